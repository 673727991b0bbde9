"""Lengths for which query_length * key_length exceeds 32 bits. A window keeps the work small: the expected rows follow
from the few keys around them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import eager
from cases import Case, Inputs
from kernels_under_test import GENERAL, assert_runs, sdpa
from oracle import eager_attention

LENGTH = 50_000
ROWS = 40  # rows compared at the beginning, in the middle and at the end

OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": (9, 4)},
    "causal": {"window": (17, None), "causal": True},
    "alibi_softcap": {"window": (6, 6), "alibi": "H", "softcap": 2.0},
}


def part(case: Case, inputs: Inputs, rows: slice) -> tuple[Case, Inputs, slice]:
    """The problem restricted to `rows` and a margin on both sides, and the place of `rows` in it."""
    begin, end = max(rows.start - 64, 0), min(rows.stop + 64, LENGTH)
    cut = inputs.mapped(lambda t: t if t.dim() == 1 else t[..., begin:end, :].double())
    length = end - begin
    return case.with_(query_length=length, key_length=length), cut, slice(rows.start - begin, rows.stop - begin)


@pytest.mark.parametrize("kernel", GENERAL, indirect=True)
@pytest.mark.parametrize("name", OPTIONS)
def test_results_with_more_than_2_to_the_31_scores(name: str, kernel: str) -> None:
    case = Case(
        f"long {name}", batch=(1,), heads=1, head_dim=4, query_length=LENGTH, key_length=LENGTH, **OPTIONS[name]
    )
    assert case.query_length * case.key_length > 2**31
    inputs = case.make().requiring_grad()
    assert_runs(kernel, case, inputs)
    output, lse, weights = sdpa(case, inputs)
    cotangents = case.cotangents()
    gradients = eager.gradients((output, lse, weights), cotangents, inputs.differentiable())
    assert cotangents.output is not None
    assert cotangents.lse is not None
    for start in (0, LENGTH // 2 + 13, LENGTH - ROWS):
        rows = slice(start, start + ROWS)
        small, cut, inside = part(case, inputs.mapped(lambda t: t.detach()), rows)
        cut = cut.requiring_grad()
        wanted = eager_attention(small, cut)
        begin = start - inside.start
        stretch = slice(begin, begin + small.query_length)
        flowing = cotangents.output[..., stretch, :].double(), cotangents.lse[..., stretch].double(), None
        wanted_gradients = eager.gradients(wanted, type(cotangents)(*flowing), cut.differentiable())
        torch.testing.assert_close(output[..., rows, :].double(), wanted[0][..., inside, :], rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(lse[..., rows].double(), wanted[1][..., inside], rtol=1e-5, atol=2e-6)
        for key, gradient in gradients.items():
            wanted_rows = wanted_gradients[key][..., inside, :]
            torch.testing.assert_close(gradient[..., rows, :].double(), wanted_rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", GENERAL, indirect=True)
def test_mask_gradient_with_more_than_2_to_the_31_scores(kernel: str) -> None:
    """The gradient of a mask of shape (Lk,) is a sum over 50,000 rows, compared with exact arithmetic."""
    case = Case("long mask", batch=(1,), heads=1, head_dim=1, query_length=LENGTH, key_length=LENGTH, window=(1, 1))
    query, key = torch.zeros(1, 1, LENGTH, 1), torch.ones(1, 1, LENGTH, 1)
    value = torch.arange(LENGTH, dtype=torch.float32).remainder(7).reshape(1, 1, LENGTH, 1)
    mask = torch.zeros(LENGTH, requires_grad=True)
    output = sdpa(case, Inputs(query, key, value, mask))[0]
    (gradient,) = torch.autograd.grad(output.sum(), mask)
    v = value.double().flatten()
    lead = torch.cat([v[:1] * math.nan, v, v[:1] * math.nan])
    windows = torch.stack([lead[:-2], lead[1:-1], lead[2:]])
    count = torch.isfinite(windows).sum(0)
    mean = torch.nansum(windows, 0) / count
    torch.testing.assert_close(output.flatten().double(), mean, rtol=1e-5, atol=1e-5)
    share = torch.nan_to_num((windows - mean) / count)  # d output[i] / d mask[i - 1], mask[i], mask[i + 1]
    wanted = share[1] + torch.cat([share[0][1:], v[:1] * 0]) + torch.cat([v[:1] * 0, share[2][:-1]])
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-5, atol=1e-5)
