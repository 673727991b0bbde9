"""Weights and sums near the smallest normal number of float32: docs/reliability.md states when they count as 0."""

from __future__ import annotations

import platform
import subprocess
import sys

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


@pytest.mark.skipif(platform.machine() != "x86_64", reason="ARM's cores compute with subnormal numbers at full speed")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("threads", [1, 2])
def test_sums_below_the_bound_are_zero(kernel: str, threads: int) -> None:
    """In kernels alone: the threads' own arithmetic has such numbers before and after the call."""
    dtype = torch.bfloat16 if "bf16" in kernel else torch.float32
    query, key = torch.randn(2, 4, 16, 256, 8, dtype=dtype).unbind()
    value = torch.full_like(key, FLUSHED / 4)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with forced(kernel):
            output = scaledot.scaled_dot_product_attention(query, key, value)
        assert output.count_nonzero() == 0
        assert (value.double() == FLUSHED / 4).all()
        assert (value.float() * torch.full_like(value, 0.5).float()).count_nonzero() == value.numel()
    finally:
        torch.set_num_threads(before)


def test_threads_that_a_call_starts_keep_subnormal_numbers() -> None:
    """A new thread has the setting of the one that starts it. In a new process, the call starts torch's threads."""
    code = """
import torch, scaledot
torch.set_num_threads(4)
query = torch.ones(1, 64, 64, 8)
scaledot.scaled_dot_product_attention(query, query, query)
print((torch.full((1 << 20,), 2.0**-128) * torch.full((1 << 20,), 0.5)).count_nonzero().item())
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(1 << 20)
