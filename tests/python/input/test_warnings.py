"""Each warning names the line of the user's code, and not one of scaledot's or torch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import scaledot
from scaledot import _zero_one_mask, fonts
from scaledot.dropin import torch_nn

QUERY = torch.randn(1, 2, 3, 8)
MASK = torch.tensor([1.0, 1.0, 0.0])


@pytest.fixture(autouse=True)
def each_warning_is_given(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_zero_one_mask, "_read", {})
    monkeypatch.setattr(_zero_one_mask, "_unseen", 1000)
    monkeypatch.setattr(fonts, "_fallbacks", list)
    with scaledot.save_for_backward(True):
        yield


def heatmap() -> Any:
    pytest.importorskip("matplotlib").use("Agg")
    return scaledot.plot.attention_heatmap([[1.0]], ["\U000e0fff\u6211"])


CALLS: dict[str, Callable[[], Any]] = {
    "former setting": lambda: scaledot.keep_weights(True),
    "former attribute": lambda: scaledot.explain(QUERY, QUERY, QUERY).kept,
    "nothing to convert": lambda: torch_nn.convert(nn.Linear(1, 1)),
    "zeros and ones": lambda: scaledot.scaled_dot_product_attention(QUERY, QUERY, QUERY, MASK),
    "zeros and ones, of a module": lambda: scaledot.MultiHeadAttention(8, 2)(QUERY[0], attn_mask=MASK),
    "no font": heatmap,
}


@pytest.mark.parametrize("name", CALLS)
def test_it_names_the_line_of_the_call(name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CALLS[name]()
    assert [warning.filename for warning in caught] == [__file__]
    line = Path(__file__).read_text().splitlines()[caught[0].lineno - 1]
    assert "lambda" in line or "attention_heatmap" in line


def test_it_is_given_once_a_line() -> None:
    """As Python does by default."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            scaledot.keep_weights(True)
    assert len(caught) == 1


def test_all_warnings_go_this_way() -> None:
    package = Path(scaledot.__file__).parent
    sources = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")}
    by_hand = {name for name, source in sources.items() if "warnings.warn" in source}
    assert by_hand == {"_warn.py", "compare/session.py"}  # the second repeats those of a whole run at its end
