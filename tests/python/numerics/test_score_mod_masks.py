"""score_mod: tiles that a function masks by itself are left out, and every bit of the results is as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import scaledot
from scaledot._score import score_arguments
from scaledot._score.program import HEADER
from score_mod_cases import formula

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 4, 700, 16
NO_KEY = -math.inf

IDS = torch.arange(LENGTH) // 150
IDS_OF_BATCH = torch.stack([IDS, torch.arange(LENGTH) // 260])
SHUFFLED = IDS[torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))]
REACH = torch.tensor([20, 100, 300, 0])
OPEN = (torch.arange(LENGTH) < 256).float()  # keys
LEVELS = torch.linspace(0, 4, LENGTH)
PARTS = (torch.arange(LENGTH) // 128 < 3).reshape(-1, 10)
SLOPES = torch.rand(HEADS, generator=torch.Generator().manual_seed(1))
INFINITE = torch.where(torch.arange(LENGTH) % 300 == 299, math.inf, 0.5)


def _nested(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    s = torch.where(k <= q, s * 2, NO_KEY)
    return torch.where(IDS[q] == IDS[k], torch.where((q - k).abs() < 90, s, NO_KEY), NO_KEY)


def _one_of_two(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(h % 2 == 0, torch.where(k <= q, s, NO_KEY), torch.where(k >= q, s, NO_KEY))


def _by_the_score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(s > 0, torch.where(k <= q, s, NO_KEY), torch.where(k <= q - 64, s - 1, NO_KEY))


# Functions with a mask.
MASKS: dict[str, Callable[..., Tensor]] = {
    "documents": lambda s, b, h, q, k: torch.where(IDS[q] == IDS[k], s, NO_KEY),
    "documents of each batch entry": lambda s, b, h, q, k: torch.where(
        IDS_OF_BATCH[b, q] == IDS_OF_BATCH[b, k], s, NO_KEY
    ),
    "documents, causal": lambda s, b, h, q, k: torch.where((IDS[q] == IDS[k]) & (q >= k), s, NO_KEY),
    "documents in no order": lambda s, b, h, q, k: torch.where(SHUFFLED[q] == SHUFFLED[k], s, NO_KEY),
    "other documents": lambda s, b, h, q, k: torch.where(IDS[q] != IDS[k], NO_KEY, s + 0.1 * (q - k)),
    "documents, filled": lambda s, b, h, q, k: s.masked_fill(IDS[q] != IDS[k], NO_KEY),
    "a window": lambda s, b, h, q, k: torch.where((q - k).abs() <= 80, s, NO_KEY),
    "a window and global keys": lambda s, b, h, q, k: torch.where((q - k < 80) & (k <= q) | (k < 3), s, NO_KEY),
    "a window of each head": lambda s, b, h, q, k: torch.where((q - k).abs() <= REACH[h], s, NO_KEY),
    "a prefix": lambda s, b, h, q, k: torch.where((k < 200) | (k <= q), s, NO_KEY),
    "blocks": lambda s, b, h, q, k: torch.where(q // 100 == k // 100, s, NO_KEY),
    "keys of a table": lambda s, b, h, q, k: torch.where(OPEN[k] > 0.5, s, NO_KEY),
    "keys from the end": lambda s, b, h, q, k: torch.where(OPEN[-1 - k] > 0.5, s, NO_KEY),
    "a boolean table": lambda s, b, h, q, k: torch.where(PARTS[k // 10, k % 10], s, NO_KEY),
    "levels": lambda s, b, h, q, k: torch.where((LEVELS[q] - LEVELS[k]).abs().floor() < 1, s, NO_KEY),
    "dilated": lambda s, b, h, q, k: torch.where((q - k) % 3 == 0, s, NO_KEY),
    "one branch of two": _one_of_two,
    "nested": _nested,
    "by the score, too": _by_the_score,
    "nothing is left": lambda s, b, h, q, k: torch.where(q < 0, s, NO_KEY),
    "biases after it": lambda s, b, h, q, k: torch.where(k <= q, s, NO_KEY) - SLOPES[h] * (q - k).abs(),
    "factors after it": lambda s, b, h, q, k: torch.where(k <= q, s, NO_KEY) * (SLOPES[h] + 0.5) / 2 + 1,
    "factors below zero": lambda s, b, h, q, k: torch.where(k <= q, s, NO_KEY) * -1.0 * -1.0,
    "a bias before it": lambda s, b, h, q, k: torch.where(k <= q, s + LEVELS[(q - k).clamp(0)], NO_KEY),
}
# Those whose -inf may become another number, so that no tile may be left out.
NO_MASKS: dict[str, Callable[..., Tensor]] = {
    "a cap after it": lambda s, b, h, q, k: 5 * torch.tanh(torch.where(k <= q, s, NO_KEY) / 5),
    "the score after it": lambda s, b, h, q, k: torch.where(k <= q, 0.0, NO_KEY) + s,
    "a large number": lambda s, b, h, q, k: torch.where(k <= q, s, -1e9),
    "a bound by the score": lambda s, b, h, q, k: torch.where(k <= q, s + LEVELS[s.abs().clamp(0, 9).int()], NO_KEY),
}  # fmt: skip


def inputs(dtype: torch.dtype = torch.float32, kv_heads: int = HEADS, rows: int = LENGTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(HEADS, rows), (kv_heads, LENGTH), (kv_heads, LENGTH)]
    return [torch.randn(BATCH, *shape, HEAD_DIM, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def mask_of(program: Tensor) -> list[int]:
    words: list[int] = program.tolist()
    return words[HEADER + words[2] + words[3] :]


def results(tensors: list[Tensor], arguments: dict[str, Any], **options: Any) -> list[Tensor]:
    """Output, lse, weights and all gradients."""
    given = (*tensors, *arguments.values(), *options.values())
    leaves = [t for t in given if isinstance(t, Tensor) and t.requires_grad]
    found = torch.ops.scaledot.sdpa(*tensors, return_weights=True, **arguments, **options)
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in found]
    return [*found, *torch.autograd.grad(found, leaves, gradients)]


def without_mask(arguments: dict[str, Any]) -> dict[str, Any]:
    program = arguments["score_program"]
    return {**arguments, "score_program": program[: len(program) - len(mask_of(program))]}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(MASKS))
def test_every_bit_is_that_of_all_tiles(name: str, dtype: torch.dtype) -> None:
    tensors = inputs(dtype)
    arguments = score_arguments(MASKS[name], *tensors, {})
    assert mask_of(arguments["score_program"])
    found, wanted = results(tensors, arguments), results(tensors, without_mask(arguments))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["documents of each batch entry", "a window of each head", "one branch of two"])
@pytest.mark.parametrize("call", ["shared heads", "one row", "few rows", "dropout", "causal", "a boolean mask"])
def test_every_bit_in_other_calls(call: str, name: str) -> None:
    sizes, options = {
        "shared heads": ({"kv_heads": 2}, {"enable_gqa": True}),
        "one row": ({"rows": 1}, {}),
        "few rows": ({"kv_heads": 1, "rows": 9}, {"enable_gqa": True}),
        "dropout": ({}, {"dropout_p": 0.3, "dropout_seed": torch.tensor([3, 4])}),
        "causal": ({}, {"is_causal": True, "window_left": 200}),
        "a boolean mask": ({}, {"attn_mask": LEVELS.reshape(-1, 1) > LEVELS.flip(0)}),
    }[call]
    tensors = inputs(**sizes)
    arguments = score_arguments(MASKS[name], *tensors, {})
    assert mask_of(arguments["score_program"])
    found, wanted = (results(tensors, one, **options) for one in (arguments, without_mask(arguments)))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["documents", "a window", "biases after it"])
def test_large_positions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of integers."""
    monkeypatch.setattr("scaledot._score.arguments.SMALL", 0)
    tensors = inputs()
    arguments = score_arguments(MASKS[name], *tensors, {})
    assert mask_of(arguments["score_program"])
    found, wanted = results(tensors, arguments), results(tensors, without_mask(arguments))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["documents of each batch entry", "a window of each head", "nested"])
def test_the_formula(name: str) -> None:
    tensors = inputs(torch.float64)
    found = scaledot.scaled_dot_product_attention(*tensors, score_mod=MASKS[name])
    torch.testing.assert_close(found, formula(*tensors, MASKS[name]))


@pytest.mark.parametrize("name", list(NO_MASKS))
def test_no_mask_is_found(name: str) -> None:
    arguments = score_arguments(NO_MASKS[name], *inputs(), {})
    assert not mask_of(arguments["score_program"])


@pytest.mark.parametrize("what", ["query", "key", "value", "captured"])
def test_what_is_not_finite(what: str) -> None:
    """NaN and inf stay where they were."""
    tensors = [tensor.detach() for tensor in inputs()]
    for k, name in enumerate(("query", "key", "value")):
        if what == name:
            tensors[k][:, :, 300, 3], tensors[k][:, :, 510, 5] = math.nan, math.inf
    tensors = [tensor.requires_grad_() for tensor in tensors]
    score_mod = MASKS["documents, causal"]
    if what == "captured":
        score_mod = lambda s, b, h, q, k: torch.where(k <= q, s, NO_KEY) + INFINITE[k]  # noqa: E731
    arguments = score_arguments(score_mod, *tensors, {})
    found, wanted = results(tensors, arguments), results(tensors, without_mask(arguments))
    assert any(not tensor.isfinite().all() for tensor in wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_a_floating_mask_gets_its_gradient() -> None:
    """Of every score, those in tiles that are left out included."""
    tensors, mask = inputs(), torch.randn(BATCH, HEADS, LENGTH, LENGTH).requires_grad_()
    arguments = score_arguments(MASKS["a window"], *tensors, {})
    found, wanted = (results(tensors, one, attn_mask=mask) for one in (arguments, without_mask(arguments)))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_captured_numbers_get_their_gradients() -> None:
    tensors, table = inputs(), torch.randn(HEADS, 2 * LENGTH).requires_grad_()
    score_mod = lambda s, b, h, q, k: torch.where(IDS[q] == IDS[k], s + table[h, q - k + LENGTH], NO_KEY)  # noqa: E731
    arguments = score_arguments(score_mod, *tensors, {})
    (given,) = (t for t in arguments.values() if t.requires_grad)
    arguments = {name: t.detach().requires_grad_() if t is given else t for name, t in arguments.items()}
    found, wanted = results(tensors, arguments), results(tensors, without_mask(arguments))
    assert found[-1].any()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_tiles_are_left_out() -> None:
    """A program that shows every key, with the mask of another: the keys of whole tiles are not attended to."""
    tensors = [tensor.detach() for tensor in inputs()]
    shows = score_arguments(lambda s, b, h, q, k: s + 0 * LEVELS[k], *tensors, {})
    hides = score_arguments(MASKS["keys of a table"], *tensors, {})
    words = shows["score_program"].tolist() + mask_of(hides["score_program"])
    arguments = {**hides, "score_program": torch.tensor(words)}
    output, _, weights = torch.ops.scaledot.sdpa(*tensors, return_weights=True, **arguments)
    query, key, value = tensors
    wanted = scaledot.scaled_dot_product_attention(query, key[:, :, :256], value[:, :, :256])
    torch.testing.assert_close(output, wanted)
    assert not weights[..., 256:].any()


def test_captured_numbers_are_read_in_each_call() -> None:
    tensors, ids = [tensor.detach() for tensor in inputs()], IDS.clone()
    score_mod = lambda s, b, h, q, k: torch.where(ids[q] == ids[k], s, NO_KEY)  # noqa: E731
    for size in (150, 700, 90):
        ids.copy_(torch.arange(LENGTH) // size)
        found = scaledot.scaled_dot_product_attention(*tensors, score_mod=score_mod)
        mask = ids[:, None] == ids
        torch.testing.assert_close(found, scaledot.scaled_dot_product_attention(*tensors, attn_mask=mask))


@pytest.mark.parametrize("place", ["in the condition", "in what is masked"])
def test_an_index_out_of_bounds_is_found_in_tiles_that_are_masked(place: str) -> None:
    tensors, short = inputs(), torch.zeros(600)
    functions: dict[str, Callable[..., Tensor]] = {
        "in the condition": lambda s, b, h, q, k: torch.where((short[k] > 0) & (k < 100), s, NO_KEY),
        "in what is masked": lambda s, b, h, q, k: torch.where(k < 100, s + short[k], NO_KEY),
    }
    with pytest.raises(IndexError, match=r"got the index 6[0-9]* for a dimension"):
        scaledot.scaled_dot_product_attention(*tensors, score_mod=functions[place])


@pytest.mark.parametrize("name", ["documents", "a cap after it"])
def test_explain_says_so(name: str) -> None:
    explanation = scaledot.explain(*inputs(), score_mod={**MASKS, **NO_MASKS}[name])
    assert explanation.skips_masked == (name in MASKS)
    assert ("tiles that score_mod masks" in str(explanation)) == (name in MASKS)
