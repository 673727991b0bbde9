"""Weights near the smallest normal number of float32: docs/reliability.md states below which one they count as 0."""

from __future__ import annotations

import pytest
import torch

import scaledot
from kernels_under_test import KERNELS, forced

FLUSHED = 2.0**-126  # float32's smallest normal number
DEPTH = 40  # keys, whose weights are 2^-100, 2^-101, ... of the first one's


def scores() -> torch.Tensor:
    """Of one row: 0, and then falling by one power of two from key to key."""
    steps = torch.arange(100, 100 + DEPTH, dtype=torch.float64) * torch.tensor(2.0, dtype=torch.float64).log()
    return torch.cat([torch.zeros(1, dtype=torch.float64), -steps])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", [1, 40])
def test_weights_down_to_the_bound_are_exact(kernel: str, rows: int) -> None:
    query, key = torch.ones(1, 1, rows, 1), scores().float()[None, None, :, None]
    value = torch.eye(1 + DEPTH)[None, None]
    exact = key.double().squeeze(-1).softmax(-1).squeeze()
    leaves = [x.requires_grad_() for x in (query, key, value)]
    with forced(kernel):
        output, weights = scaledot.scaled_dot_product_attention(*leaves, scale=1.0, return_weights=True)
        output.backward(torch.ones_like(output))
    kept = exact >= FLUSHED
    for found in (weights[0, 0], output[0, 0], leaves[2].grad[0, 0].T / rows):
        assert found.shape[-1] == 1 + DEPTH
        torch.testing.assert_close(found.double()[..., kept], exact[kept].expand(found.shape[0], -1), rtol=1e-5, atol=0)
        assert (found[..., ~kept] >= 0).all()
        assert (found.double()[..., ~kept] <= exact[~kept] * (1 + 1e-5)).all()
