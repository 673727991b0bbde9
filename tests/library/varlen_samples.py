"""Packed sequences under torch.vmap: the samples, what vmap has to give, and how often the ops may run for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import scaledot
from op_calls import Calls
from varlen_cases import cumulative

SAMPLES = 3
ROWS, KEYS = (3, 0, 4), (2, 5, 6)
CU_Q, CU_K = cumulative(ROWS), cumulative(KEYS)
attend: Any = scaledot.varlen_attention


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def qkv(heads: int = 2, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return normal(sum(ROWS), heads, 4), normal(sum(KEYS), kv_heads, 4), normal(sum(KEYS), kv_heads, 3)


def samples_of(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.stack([torch.randn_like(t) for _ in range(SAMPLES)]) for t in tensors)


def looped(function: Any, in_dims: Any, *tensors: Tensor) -> Any:
    """The meaning of vmap(function, in_dims)(*tensors)."""
    results = [
        function(*(t if d is None else t.select(d, i) for t, d in zip(tensors, in_dims, strict=True)))
        for i in range(SAMPLES)
    ]
    if isinstance(results[0], tuple):
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return torch.stack(results)


def assert_bits(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@contextlib.contextmanager
def calls(**wanted: int) -> Iterator[None]:
    """Exactly these calls of our ops reach the kernels."""
    with Calls() as mode:
        yield
    assert {name: mode.count(name) for name in wanted} == wanted
    assert len(mode.names) == sum(wanted.values())
