"""scaledot.merge_states: attention over parts of the keys, merged, is attention over all keys."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import scaledot
from scaledot import merge_states, scaled_dot_product_attention

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def inputs(dtype: torch.dtype, lengths: tuple[int, int] = (5, 9)) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, length, 8) for length in (lengths[0], lengths[1], lengths[1])]
    query, key, value = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return query, key, value


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_parts_make_the_whole(dtype: torch.dtype) -> None:
    query, key, value = inputs(dtype)
    whole = scaled_dot_product_attention(query, key, value, return_lse=True)
    parts = [
        scaled_dot_product_attention(query, key[..., a:b, :], value[..., a:b, :], return_lse=True)
        for a, b in pairwise((0, 2, 5, 9))
    ]
    merged = merge_states(*merge_states(*parts[0], *parts[1]), *parts[2])
    reverse = merge_states(*parts[2], *merge_states(*parts[1], *parts[0]))
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    for out, lse in (merged, reverse):
        assert (out.dtype, lse.dtype) == (dtype, lse_dtype)
        torch.testing.assert_close(out, whole[0], atol=TOLERANCE[dtype], rtol=0)
        torch.testing.assert_close(lse, whole[1], atol=TOLERANCE[lse_dtype], rtol=0)


def test_gradients_of_the_parts_make_those_of_the_whole() -> None:
    leaves = [t.requires_grad_() for t in inputs(torch.float64)]
    query, key, value = leaves
    whole = scaled_dot_product_attention(query, key, value, return_lse=True)
    parts = [
        scaled_dot_product_attention(query, key[..., s, :], value[..., s, :], return_lse=True)
        for s in (slice(0, 4), slice(4, 9))
    ]
    merged = merge_states(*parts[0], *parts[1])
    cotangents = [torch.randn_like(t) for t in whole]
    expected = torch.autograd.grad(whole, leaves, cotangents)
    for ours, theirs in zip(torch.autograd.grad(merged, leaves, cotangents), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def states(*lse: float) -> tuple[Tensor, Tensor]:
    """One state with a row for each lse; a row without keys has output 0, as attention gives it."""
    column = torch.tensor(lse, dtype=torch.float64)
    out = torch.randn(len(lse), 4, dtype=torch.float64)
    return torch.where((column == -math.inf)[:, None], 0.0, out).requires_grad_(), column.requires_grad_()


def test_empty_rows() -> None:
    infinite = math.inf
    out_a, lse_a = states(0.3, -infinite, 2.0, -infinite)
    out_b, lse_b = states(-infinite, -1.0, 1.0, -infinite)
    out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(out[0], out_a[0])
    torch.testing.assert_close(out[1], out_b[1])
    assert out[3].eq(0).all()
    torch.testing.assert_close(lse[:2], torch.tensor([0.3, -1.0], dtype=torch.float64))
    assert lse[3] == -infinite
    gradients = torch.autograd.grad(
        (out, lse), (out_a, lse_a, out_b, lse_b), [torch.ones_like(out), torch.ones_like(lse)]
    )
    for gradient in gradients:
        assert torch.isfinite(gradient).all()
        assert gradient[3].eq(0).all()


def test_what_an_empty_side_holds_is_not_seen() -> None:
    out_a, lse_a = states(0.3, 0.1)
    out_b = torch.full((2, 4), math.nan, dtype=torch.float64, requires_grad=True)
    lse_b = torch.full((2,), -math.inf, dtype=torch.float64, requires_grad=True)
    out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(out, out_a)
    gradients = torch.autograd.grad(out.sum() + lse.sum(), (out_a, lse_a, out_b, lse_b))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_nan_is_passed_on() -> None:
    out, lse = merge_states(*states(0.3, 0.1), *states(math.nan, 0.0))
    assert out[0].isnan().all()
    assert lse[0].isnan()
    assert out[1].isfinite().all()


def test_gradcheck() -> None:
    arguments = (*states(0.3, -2.0), *states(1.0, 0.2))
    assert torch.autograd.gradcheck(merge_states, arguments)
    assert torch.autograd.gradgradcheck(merge_states, arguments)


def test_large_lse_does_not_overflow() -> None:
    out_a, lse_a = states(1000.0, -1000.0)
    out_b, lse_b = states(999.0, -1001.0)
    out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    share = 1 / (1 + math.exp(-1))
    torch.testing.assert_close(out, share * out_a + (1 - share) * out_b)
    torch.testing.assert_close(lse, torch.tensor([1000.0, -1000.0], dtype=torch.float64) - math.log(share))


def test_is_exported() -> None:
    assert scaledot.merge_states is merge_states


OUT, LSE = torch.zeros(3, 4), torch.zeros(3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((OUT, LSE, torch.zeros(2, 4), LSE), ValueError, r"out_b: got shape \(2, 4\); needs \(3, 4\)"),
        ((OUT, torch.zeros(4), OUT, LSE), ValueError, r"lse_a: got shape \(4,\); needs \(3,\)"),
        ((OUT, LSE, OUT, torch.zeros(3, 1)), ValueError, "lse_b: got shape"),
        ((OUT.int(), LSE, OUT, LSE), TypeError, "out_a: got dtype torch.int32"),
        ((OUT, LSE.bool(), OUT, LSE), TypeError, "lse_a: got dtype torch.bool"),
        ((OUT, LSE.numpy(), OUT, LSE), TypeError, r"lse_a: got a numpy.ndarray of shape .*torch.from_numpy\(lse_a\)"),
        ((OUT, LSE, None, LSE), TypeError, "out_b: got None; needs a torch.Tensor"),
        ((OUT, LSE, OUT.to("meta"), LSE), RuntimeError, "out_b: got a tensor on meta"),
        ((torch.tensor(1.0), torch.tensor(1.0), OUT, LSE), ValueError, "out_a: got a tensor without dim"),
    ],
)
def test_errors(arguments: tuple[Tensor, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        merge_states(*arguments)
