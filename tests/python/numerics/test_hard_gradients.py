"""Gradients where rounding errors do not cancel by themselves: large scores, and keys that have much in common."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from reference import attention
from scaledot import scaled_dot_product_attention

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
SHARED = 64.0  # of the first element of every key


def draw(seed: int, rows: int, keys: int, dtype: torch.dtype, shared: float, heads: tuple[int, int]) -> list[Tensor]:
    """query, key, value and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(heads[0], rows), (heads[1], keys), (heads[1], keys), (heads[0], rows)]
    tensors = [torch.randn(2, h, length, 48, generator=generator) for h, length in sizes]
    tensors[1][..., 0] += shared
    return [t.to(dtype) for t in tensors]


def output_of_formula(*inputs: Tensor, **options: Any) -> Tensor:
    return attention(*inputs, **options)[0]


def gradients(function: Any, tensors: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    *inputs, cotangent = tensors
    leaves = [t.detach().requires_grad_() for t in inputs]
    return torch.autograd.grad(function(*leaves, **options), leaves, cotangent)


def units(found: Tensor, exact: Tensor) -> float:
    """The largest error, in unit roundoffs of the largest exact element."""
    return float((found.double() - exact).abs().max() / exact.abs().max() / UNIT[found.dtype])


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": dict(rows=150, keys=600),
    "causal": dict(rows=600, keys=600, is_causal=True),
    "one tile": dict(rows=70, keys=100),
    "few rows": dict(rows=3, keys=600),
    "shared KV heads": dict(rows=150, keys=300, heads=(4, 1), enable_gqa=True),
    "softcap": dict(rows=150, keys=600, softcap=20.0),
    "window": dict(rows=600, keys=600, window=(100, 50)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_gradient_of_query_where_keys_share_a_large_element(name: str, dtype: torch.dtype) -> None:
    options = dict(OPTIONS[name])
    heads = options.pop("heads", (2, 2))
    tensors = draw(1, options.pop("rows"), options.pop("keys"), dtype, SHARED, heads)
    exact = gradients(output_of_formula, [t.double() for t in tensors], **options)
    found = gradients(scaled_dot_product_attention, tensors, **options)
    for gradient, of_formula in zip(found, exact, strict=True):
        assert units(gradient, of_formula) < 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 8, 20])
def test_the_gradients_of_few_rows_with_large_scores(rows: int, dtype: torch.dtype) -> None:
    """Rounding errors of scores cancel in dS if P, dP and delta are of the same numbers."""
    tensors = draw(2, rows, 192, torch.float32, -100.0, (2, 2))
    tensors[0][..., 0] += 7
    tensors = [t.to(dtype) for t in tensors]
    exact = gradients(output_of_formula, [t.double() for t in tensors])
    found = gradients(scaled_dot_product_attention, tensors)
    for gradient, of_formula in zip(found, exact, strict=True):
        assert units(gradient, of_formula) < (4000 if dtype == torch.float32 else 3)
