"""A slice of the fuzzing of the Python functions, the same in each run; `bash tests/fuzz/run api` draws more."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

import scaledot
from fuzz.api import corpus_files
from fuzz.api.judge import judge
from strategies import CALLS, SDPA, Call

SLICE = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@SLICE
@given(call=CALLS)
def test_drawn_calls_give_right_numbers_or_an_error_that_names_an_argument(call: Call) -> None:
    judge(call)


def test_calls_that_failed_once() -> None:
    calls = corpus_files.calls()
    assert calls, "the corpus is empty"
    for call in calls.values():
        judge(call)


RIGHT = Call(
    SDPA,
    (
        ("query", "torch.randn(2, 2, 5, 8)"),
        ("key", "torch.randn(2, 2, 7, 8)"),
        ("value", "torch.randn(2, 2, 7, 8)"),
        ("return_lse", "True"),
    ),
)
PACKED = Call(
    "scaledot.varlen_attention",
    (
        ("query", "torch.randn(7, 2, 8)"),
        ("key", "torch.randn(9, 2, 8)"),
        ("value", "torch.randn(9, 2, 8)"),
        ("cu_seq_q", "torch.tensor([0, 3, 7])"),
        ("cu_seq_k", "torch.tensor([0, 4, 9])"),
        ("max_q", "4"),
        ("max_k", "5"),
    ),
)
MODULE = Call("scaledot.MultiHeadAttention(8, 2)", (("query", "torch.randn(2, 5, 8)"), ("need_weights", "True")))


@pytest.mark.parametrize("call", [RIGHT, PACKED, MODULE])
def test_a_right_call_is_compared(call: Call) -> None:
    assert judge(call) == "right"


@pytest.mark.parametrize("call", [RIGHT, PACKED, MODULE])
def test_wrong_numbers_and_gradients_are_found(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "varlen_attention" if call is PACKED else "scaled_dot_product_attention"
    real = getattr(scaledot, name)

    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
            return output.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 1.001

    for change in (lambda output: output * 1.00001, WrongGradient.apply):

        def wrong(*arguments: Any, change: Any = change, **options: Any) -> Any:
            result = real(*arguments, **options)
            return (change(result[0]), *result[1:]) if isinstance(result, tuple) else change(result)

        wrong.__signature__ = real.__signature__  # type: ignore[attr-defined]
        monkeypatch.setattr(scaledot.modules if call is MODULE else scaledot, name, wrong)
        with pytest.raises(AssertionError, match="is over the limit"):
            judge(call)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("query: bad"), "not of the form"),
        (RuntimeError("nowhere: got 1; needs 2"), "names nowhere, which is no argument"),
        (IndexError("query: got 1; needs 2"), "query: got 1"),
    ],
)
def test_wrong_errors_are_found(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(query: Any, key: Any, value: Any, return_lse: Any) -> Any:
        raise error

    monkeypatch.setattr(scaledot, "scaled_dot_product_attention", wrong)
    with pytest.raises((AssertionError, IndexError), match=message):
        judge(RIGHT)


def test_a_call_prints_as_a_program() -> None:
    printed = subprocess.run([sys.executable, "-c", RIGHT.program()], check=True, capture_output=True, text=True)
    assert printed.stdout.startswith("(tensor(")
