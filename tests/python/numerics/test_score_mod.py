"""score_mod: score functions of the user, against the formula on all scores in float64 and its autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import scaledot
from kernels_under_test import BFLOAT16_ONLY, GENERAL
from scaledot._score import score_arguments
from scaledot._score.graph import SPACES
from scaledot._score.program import HEADER
from score_mod_cases import (
    FUNCTIONS,
    LIMITS,
    SHAPE,
    Captured,
    compared,
    document,
    every_score,
    formula,
    gated,
    inputs,
    places,
)


@pytest.mark.parametrize("dtype", list(LIMITS), ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_function(name: str, dtype: torch.dtype) -> None:
    compared(name, dtype)


@pytest.mark.parametrize("name", ["alibi", "document", "mixed"])
@pytest.mark.parametrize("mask", ["causal", "window", "boolean", "blocks", "floating"])
def test_with_masks(name: str, mask: str) -> None:
    i, j = places()
    generator = torch.Generator().manual_seed(3)
    boolean = torch.rand(SHAPE["rows"], SHAPE["keys"], generator=generator) < 0.5
    boolean[5] = False
    floating = torch.zeros(boolean.shape).masked_fill(~boolean, -math.inf)
    block_mask = create_block_mask(
        lambda b, h, q, k: k <= q, None, None, SHAPE["rows"], SHAPE["keys"], device="cpu", BLOCK_SIZE=16
    )
    options, attends = {
        "causal": ({"is_causal": True}, j <= i),
        "window": ({"window": (9, 4)}, (j >= i - 9) & (j <= i + 4)),
        "boolean": ({"attn_mask": boolean}, boolean),
        "blocks": ({"block_mask": block_mask}, j <= i),
        "floating": ({"attn_mask": floating}, boolean),
    }[mask]
    compared(name, torch.float32, attends, **options)


@pytest.mark.parametrize("name", ["alibi", "relative", "full table", "mixed"])
def test_shared_heads(name: str) -> None:
    compared(name, torch.float32, sizes={"kv_heads": 2}, enable_gqa=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["by distance", "a distance alone", "dilated"])
@pytest.mark.parametrize("call", ["many tiles", "heads share tiles", "causal"])
def test_distances(call: str, name: str, dtype: torch.dtype) -> None:
    sizes, options, attends = {"rows": 150, "keys": 290}, {}, None
    if call == "heads share tiles":
        sizes, options = {"rows": 9, "keys": 290, "kv_heads": 1}, {"enable_gqa": True}
    elif call == "causal":
        options, attends = {"is_causal": True}, torch.ones(150, 290, dtype=torch.bool).tril()
    compared(name, dtype, attends, sizes, **options)


def test_what_distances_decide_is_computed_once_a_tile() -> None:
    query, key, value = (tensor.detach() for tensor in inputs(torch.float32))
    arguments = score_arguments(FUNCTIONS["dilated"](Captured(torch.float32)), query, key, value, {})
    _constant, head, row, key_alone, distance, score = arguments["score_program"][HEADER : HEADER + SPACES].tolist()
    assert (head, row, key_alone) == (0, 0, 0)
    assert distance >= 4  # the distance, its remainder, a comparison
    assert score == 2  # scale * dot product, and which of two it becomes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("by", [20.0, 3.0, -0.7, 1 / 3, 1e4, 3e-25, 2e30, 1e-310, math.inf])
def test_one_divisor_for_all_keys_gives_the_bits_of_a_division(by: float, dtype: torch.dtype, kernel: str) -> None:
    """It is multiplied by its inverse, and corrected. The divisor of each key is divided by."""
    query, key, value = inputs(dtype)
    by_key, by_head = torch.full((SHAPE["keys"],), by, dtype=dtype), torch.full((SHAPE["heads"],), by, dtype=dtype)

    def results(quotient: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
        def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (quotient(torch.where((k == 3) & (q > 4), -math.inf, 9 * s), h, k) * by).clamp(-1e3, 1e3)

        output = scaledot.scaled_dot_product_attention(query, key, value, score_mod=score_mod)
        return [output, *torch.autograd.grad(output.sum(), (query, key, value))]

    wanted = results(lambda s, h, k: s / by_key[k])
    for found in (results(lambda s, h, k: s / by), results(lambda s, h, k: s / by_head[h])):
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


SWAPPED = torch.tensor([0, 1, 2, 4, 3, 5, 6, 7])
LOADS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one number": lambda i, j: 0 * j + 3,
    "rising": lambda i, j: i + j,
    "falling": lambda i, j: i - j + SHAPE["keys"],
    "falling, then one": lambda i, j: (i - j).clamp(-8, 8) + 8,
    "rising by two": lambda i, j: 2 * j,
    "rising, with a gap": lambda i, j: torch.where(j % 8 == 5, 0, j),
    "rising, but for two": lambda i, j: j // 8 * 8 + SWAPPED[j % 8],
    "any": lambda i, j: (i * 31 + j * j * 17) % 120,
}


@pytest.mark.parametrize("kernel", [*GENERAL, *BFLOAT16_ONLY], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", list(LOADS))
def test_keys_that_load_a_number(name: str, dtype: str, kernel: str) -> None:
    """Kernels add the gradients of keys that load one number, or neighbours in order, in a way of their own."""
    index = LOADS[name](*places()).expand(SHAPE["rows"], SHAPE["keys"]).contiguous()
    tensors, table = inputs(getattr(torch, dtype)), torch.randn(4, 120, requires_grad=True)
    exact, wide = ([t.detach().double().requires_grad_() for t in those] for those in (tensors, [table]))

    def score_mod_of(numbers: Tensor) -> Callable[..., Tensor]:
        return lambda s, b, h, q, k: s * numbers[h, index[q, k]]

    output = scaledot.scaled_dot_product_attention(*tensors, score_mod=score_mod_of(table))
    wanted = formula(*exact, score_mod_of(wide[0]))
    grad = torch.randn(wanted.shape).to(output.dtype)
    (found,), (right,) = torch.autograd.grad(output, table, grad), torch.autograd.grad(wanted, wide, grad.double())
    assert (found - right).abs().max() < 8 * LIMITS[output.dtype] * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("name", ["gated", "document"])
@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows(name: str, rows: int) -> None:
    compared(name, torch.float32, sizes={"rows": rows})


def test_weights_and_lse() -> None:
    query, key, value = inputs(torch.float32)
    captured = Captured(torch.float32)
    output, weights, lse = scaledot.scaled_dot_product_attention(
        query, key, value, score_mod=document(captured), return_weights=True, return_lse=True
    )
    scores = every_score(document(captured), query @ key.mT / 4)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(weights, scores.softmax(-1))
    torch.testing.assert_close(weights @ value, output)


def test_a_hidden_key_may_be_nan() -> None:
    query, key, value = (tensor.detach() for tensor in inputs(torch.float32))
    score_mod = lambda s, b, h, q, k: torch.where(k == 7, -math.inf, s)  # noqa: E731
    clean = scaledot.scaled_dot_product_attention(query, key, value, score_mod=score_mod)
    for tensor in (key, value):
        tensor[:, :, 7] = math.nan
    for tensor in (query, key, value):
        tensor.requires_grad_()
    output = scaledot.scaled_dot_product_attention(query, key, value, score_mod=score_mod)
    assert torch.equal(output, clean)
    for gradient in torch.autograd.grad(output.sum(), (query, key, value)):
        assert gradient.isfinite().all()


def test_a_row_without_keys() -> None:
    query, key, value = inputs(torch.float32)
    score_mod = lambda s, b, h, q, k: torch.where(q == 3, -math.inf, s)  # noqa: E731
    output, lse = scaledot.scaled_dot_product_attention(query, key, value, score_mod=score_mod, return_lse=True)
    assert not output[:, :, 3].any()
    assert (lse[:, :, 3] == -math.inf).all()
    for gradient in torch.autograd.grad(output.sum(), (query, key, value)):
        assert gradient.isfinite().all()


def test_explain() -> None:
    query, key, value = inputs(torch.float32)
    explanation = scaledot.explain(query, key, value, score_mod=gated(Captured(torch.float32)))
    assert explanation.forward.kernel != "none"
    assert "it has no score_mod" in str(explanation)
