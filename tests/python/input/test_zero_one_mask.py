"""The warning for a floating mask of zeros and ones, which hides nothing."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import scaledot
from bad_arguments import refused
from scaledot import _zero_one_mask

QUERY = torch.randn(1, 2, 3, 8)
MASK = torch.tensor([1.0, 1.0, 0.0])


@pytest.fixture(autouse=True)
def masks_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_zero_one_mask, "_read", {})
    monkeypatch.setattr(_zero_one_mask, "_unseen", 1000)


def warned(mask: Tensor) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaledot.scaled_dot_product_attention(QUERY, QUERY, QUERY, mask)
    return sum("zeros and ones" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_line_of_code_gives_it_once(dtype: torch.dtype) -> None:
    query = QUERY.to(dtype)
    with pytest.warns(UserWarning, match=r"attn_mask\.bool\(\)"):
        scaledot.scaled_dot_product_attention(query, query, query, MASK.to(dtype))
    assert [warned(MASK) for _ in range(3)] == [1, 0, 0]


@pytest.mark.parametrize("left", [0, 8])
def test_a_mask_on_too_small_a_storage_is_refused_before_it_is_read(left: int) -> None:
    mask = MASK.clone()
    mask.untyped_storage().resize_(left)
    with refused("attn_mask", f"on a storage of {left} bytes"):
        scaledot.scaled_dot_product_attention(QUERY, QUERY, QUERY, mask)


def test_the_module_gives_it() -> None:
    attention = scaledot.MultiHeadAttention(8, 2)
    with pytest.warns(UserWarning, match="zeros and ones"):
        attention(QUERY[0], attn_mask=MASK)


@pytest.mark.parametrize(
    "mask",
    [
        MASK.bool(),
        torch.zeros(3),
        torch.ones(3),
        torch.tensor([0.0, 1.0, 0.5]),
        torch.tensor([0.0, 1.0, -torch.inf]),
        torch.tensor([0.0, 1.0, torch.nan]),
        MASK.clone().requires_grad_(),  # learnt
    ],
    ids=["boolean", "zeros", "ones", "half", "inf", "nan", "learnt"],
)
def test_other_masks_give_none(mask: Tensor) -> None:
    assert warned(mask) == 0


def test_only_the_first_masks_of_a_line_are_read() -> None:
    for _ in range(8):
        assert warned(torch.zeros(3)) == 0
    assert warned(MASK) == 0


def test_a_long_run_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(1000):
        warned(torch.zeros(3))
    monkeypatch.setattr(_zero_one_mask, "users_frame", None)  # an error if it is called
    assert warned(MASK) == 0


def test_transforms_and_traces_do_not_read_it() -> None:
    def attend(mask: Tensor) -> Tensor:
        output: Tensor = scaledot.scaled_dot_product_attention(QUERY, QUERY, QUERY, mask)
        return output

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.func.vmap(attend)(MASK.expand(4, 3))
        graph = torch.fx.experimental.proxy_tensor.make_fx(attend)(MASK)
        torch.compile(attend, backend="eager", fullgraph=True)(MASK)
    assert not any("aminmax" in str(node.target) for node in graph.graph.nodes)


def test_a_dtype_that_the_op_refuses_is_left_to_it() -> None:
    query = torch.randn(1, 1, 2, 4)
    with pytest.raises(TypeError, match="attn_mask: got"):
        scaledot.scaled_dot_product_attention(query, query, query, torch.eye(2).to(torch.float8_e4m3fn))
