"""A slice of the fuzzing of the Python functions, the same in each run; `bash tests/fuzz/run api` draws more."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch

import fuzz.api.__main__
import scaledot
import strategies_flash_attn
from call_sources import Call
from fuzz.api import corpus_files
from fuzz.api.__main__ import FailedError, play
from fuzz.api.judge import judge
from strategies import SDPA


def test_drawn_calls_give_right_numbers_or_an_error_that_names_an_argument() -> None:
    counts: Counter[str] = Counter()
    for number in range(8):
        try:
            play(number, counts)
        except FailedError as failed:
            pytest.fail(f"{failed}\n{failed.call.program()}")
    functions = {name.partition(":")[0] for name in counts}
    assert len(functions) == 10, functions
    for function in functions:
        assert counts[f"{function}: right"]
        assert counts[f"{function}: refused"]


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
SCORED = Call(
    SDPA, (*RIGHT.arguments, ("score_mod", "(lambda t: lambda s, b, h, i, j: s + t[h] * (i - j).abs())(torch.ones(2))"))
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
JAGGED_ROWS = "torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(4, 2, 8)], layout=torch.jagged)"
JAGGED = Call(
    SDPA, (*((name, f"{JAGGED_ROWS}.transpose(1, 2)") for name in ("query", "key", "value")), ("return_lse", "True"))
)
FLASH_ATTN = "scaledot.dropin.flash_attn.flash_attn_"
FLASH = Call(
    f"{FLASH_ATTN}func",
    (*((name, "torch.randn(2, 5, 2, 8)") for name in "qkv"), ("dropout_p", "0.25"), ("return_attn_probs", "True")),
)
FLASH_KV = Call(f"{FLASH_ATTN}kvpacked_func", (("q", "torch.randn(2, 5, 2, 8)"), ("kv", "torch.randn(2, 6, 2, 2, 8)")))
FLASH_QKV = Call(f"{FLASH_ATTN}qkvpacked_func", (("qkv", "torch.randn(2, 5, 3, 2, 8)"), ("causal", "True")))
ENDS = "torch.tensor([0, 3, 7])"
LENGTHS = (("cu_seqlens_q", ENDS), ("cu_seqlens_k", ENDS), ("max_seqlen_q", "4"), ("max_seqlen_k", "4"))
FLASH_PACKED = Call(f"{FLASH_ATTN}varlen_func", (*((name, "torch.randn(7, 2, 8)") for name in "qkv"), *LENGTHS))
FLASH_PACKED_KV = Call(
    f"{FLASH_ATTN}varlen_kvpacked_func", (("q", "torch.randn(7, 2, 8)"), ("kv", "torch.randn(7, 2, 2, 8)"), *LENGTHS)
)
FLASH_PACKED_QKV = Call(
    f"{FLASH_ATTN}varlen_qkvpacked_func",
    (("qkv", "torch.randn(7, 3, 2, 8)"), ("cu_seqlens", ENDS), ("max_seqlen", "4")),
)
CACHE = Call(
    f"{FLASH_ATTN}with_kvcache",
    (
        ("q", "torch.randn(2, 3, 2, 8)"),
        ("k_cache", "torch.randn(3, 9, 2, 8)"),
        ("v_cache", "torch.randn(3, 9, 2, 8)"),
        ("k", "torch.randn(2, 3, 2, 8)"),
        ("v", "torch.randn(2, 3, 2, 8)"),
        ("rotary_cos", "torch.randn(12, 3).cos()"),
        ("rotary_sin", "torch.randn(12, 3).sin()"),
        ("cache_seqlens", "torch.tensor([2, 5])"),
        ("cache_batch_idx", "torch.tensor([2, 0])"),
        ("causal", "True"),
    ),
)
CALLS = {
    "dense": RIGHT, "score function": SCORED,
    "packed": PACKED, "module": MODULE, "jagged": JAGGED, "flash": FLASH, "flash kv": FLASH_KV,
    "flash qkv": FLASH_QKV, "flash packed": FLASH_PACKED, "flash packed kv": FLASH_PACKED_KV,
    "flash packed qkv": FLASH_PACKED_QKV, "cache": CACHE,
}  # fmt: skip


def function_of(call: Call) -> tuple[Any, str]:
    """(the module, the name of the function in it) that computes the call."""
    if call is MODULE:
        return scaledot.modules, "scaled_dot_product_attention"
    module, _, name = call.function.rpartition(".")
    return eval(module, {"scaledot": scaledot}), name


def replace(call: Call, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = function_of(call)
    wrong.__signature__ = inspect.signature(getattr(module, name))
    monkeypatch.setattr(module, name, wrong)


@pytest.mark.parametrize("name", CALLS)
def test_a_right_call_is_compared(name: str) -> None:
    assert judge(CALLS[name]) == "right"


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 1.001


CHANGES = {"numbers": lambda output: output * 1.00001, "gradients": WrongGradient.apply}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", CALLS)
def test_wrong_numbers_and_gradients_are_found(name: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS[name]
    if call is CACHE and change == "gradients":
        return  # it has none
    module, function = function_of(call)
    real = getattr(module, function)

    def changed(result: Any, place: int) -> Any:
        if not isinstance(result, tuple):
            return CHANGES[change](result)
        parts = list(result)
        parts[place] = CHANGES[change](parts[place])
        return tuple(parts)

    for place in (0,) if call is MODULE else (0, -1):

        def wrong(*arguments: Any, place: int = place, **options: Any) -> Any:
            return changed(real(*arguments, **options), place)

        with monkeypatch.context() as patched:
            replace(call, wrong, patched)
            with pytest.raises(AssertionError, match="is over the limit"):
                judge(call)


def test_a_wrong_gradient_of_a_captured_tensor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = scaledot.scaled_dot_product_attention

    def wrong(*arguments: Any, score_mod: Any, **options: Any) -> Any:
        def changed(s: Any, *places: Any) -> Any:
            return score_mod(s, *places) * 1.0

        slopes = score_mod.__closure__[0].cell_contents
        result = real(*arguments, score_mod=changed, **options)
        return (result[0] + 0.001 * (slopes - slopes.detach()).sum(), *result[1:])

    replace(SCORED, wrong, monkeypatch)
    with pytest.raises(AssertionError, match=r"gradient of captured_t: error .* is over the limit"):
        judge(SCORED)


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
def test_a_wrong_cache_is_found(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = scaledot.dropin.flash_attn.flash_attn_with_kvcache

    def wrong(**arguments: Any) -> Any:
        before = arguments[cache].clone()
        result = real(**arguments)
        arguments[cache][2, 4] = before[2, 4]  # the last new key of the first sequence is lost
        return result

    replace(CACHE, wrong, monkeypatch)
    with pytest.raises(AssertionError, match="is over the limit"):
        judge(CACHE)


ERRORS: dict[str, tuple[Exception, str]] = {
    "form": (ValueError("query: bad"), "not of the form"),
    "name": (RuntimeError("nowhere: got 1; needs 2"), "names nowhere, which is no argument"),
    "type": (IndexError("query: got 1; needs 2"), "query: got 1"),
}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("name", CALLS)
def test_wrong_errors_are_found(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, message = ERRORS[kind]

    def wrong(*arguments: Any, **options: Any) -> Any:
        raise error

    replace(CALLS[name], wrong, monkeypatch)
    with pytest.raises((AssertionError, IndexError), match=message):
        judge(CALLS[name])


def test_a_planted_error_is_found_and_its_call_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    real = scaledot.dropin.flash_attn.flash_attn_func

    def wrong(*arguments: Any, **options: Any) -> Any:
        window = options.get("window_size")
        if isinstance(window, tuple) and len(window) == 2 and type(window[0]) is int and 0 < window[0] < 9:
            options["window_size"] = (window[0] + 1, window[1])
        return real(*arguments, **options)

    def play_many() -> None:
        for number in range(10):
            play(number, Counter())

    replace(FLASH, wrong, monkeypatch)
    monkeypatch.setattr(fuzz.api.__main__, "CALLS", strategies_flash_attn.dense_calls())
    with pytest.raises(FailedError) as raised:
        play_many()
    arguments = dict(raised.value.call.arguments)
    assert {"q", "k", "v", "window_size"} <= set(arguments)
    assert len(arguments) <= 6, raised.value.call.program()


def test_a_call_prints_as_a_program() -> None:
    printed = subprocess.run([sys.executable, "-c", RIGHT.program()], check=True, capture_output=True, text=True)
    assert printed.stdout.startswith("(tensor(")
