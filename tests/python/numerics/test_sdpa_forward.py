"""Output, lse and weights: every case, by every kernel, against the float64 oracle."""

from __future__ import annotations

import pytest
import torch

from case_list import CASES
from cases import Case
from eager import attention
from kernels_under_test import pairs, sdpa
from oracle import RESULTS, eager_attention, keep_mask, reference_attention, solve
from tolerances import check


@pytest.mark.parametrize(("case", "kernel"), pairs(CASES, ("forward",)), indirect=["kernel"])
def test_forward(case: Case, kernel: str) -> None:
    inputs, solution = case.make(), solve(case)
    output, lse, weights = sdpa(case, inputs)
    assert output.dtype == case.torch_dtype
    assert lse.dtype == (torch.float64 if case.dtype == "float64" else torch.float32)
    solution.check_results((output, lse, weights), case.return_weights)
    assert torch.equal(lse == -torch.inf, solution.results["lse"] == -torch.inf), "lse is -inf in the wrong rows"
    if case.return_weights:
        assert weights.dtype == case.torch_dtype
    else:
        assert weights.shape == (0,)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_oracle_is_eager_attention(case: Case) -> None:
    """reference.py and tests/library/eager.py are independent and give the same numbers in float64."""
    case = case.with_(dtype="float64", mask_dtype=None)
    inputs = case.make()
    found, wanted = (
        dict(zip(RESULTS, attend(case, inputs), strict=True)) for attend in (reference_attention, eager_attention)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_weights_times_value_is_the_output(kernel: str) -> None:
    case = Case("weights times value", dropout_p=0.4, softcap=2.0, mask="inf", return_weights=True, dtype="float64")
    inputs = case.make()
    output, _, weights = sdpa(case, inputs)
    torch.testing.assert_close(weights @ inputs.value, output, rtol=1e-12, atol=1e-12)
    assert attention(case, inputs, keep_mask(case, inputs))[2].count_nonzero() == weights.count_nonzero()


def test_returning_weights_changes_no_other_result(kernel: str) -> None:
    case = Case("ask for weights", dropout_p=0.1, causal=True, dtype="bfloat16", query_length=130, key_length=150)
    inputs = case.make()
    plain, asked = sdpa(case, inputs), sdpa(case, inputs, return_weights=True)
    check("output", asked[0], plain[0].double(), 0.0)
    check("lse", asked[1], plain[1].double(), 0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_layout_of_the_output(dtype: str, kernel: str) -> None:
    """With 4 or more dimensions memory is (..., Lq, H, Dv), so merging heads is a view; otherwise it is contiguous."""
    for case in (Case("4d", batch=(3,), dtype=dtype), Case("5d", batch=(3, 2), dtype=dtype)):
        assert sdpa(case, case.make())[0].transpose(-3, -2).is_contiguous(), case.name
    for case in (Case("3d", batch=(), heads=3, dtype=dtype), Case("2d", batch=(), heads=None, dtype=dtype)):
        assert sdpa(case, case.make())[0].is_contiguous(), case.name
