"""The arguments shared with torch.nn.functional.scaled_dot_product_attention mean the same here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import scaledot
from case_list import CASES
from cases import Case
from oracle import solve


def in_torch(case: Case) -> bool:
    """Whether F.sdpa can run the case without NaN in its result."""
    ours_only = case.window, case.softcap
    plain = (
        all(option is None for option in ours_only)
        and case.alibi == case.relative == case.blocks == "none"
        and case.dropout_p == 0
        and case.causal_alignment == "upper_left"
    )
    return (
        plain
        and case.masked_score == -float("inf")
        and not case.empty_rows
        and not (case.causal and case.mask != "none")
        and len(case.mask_shape) > 1  # F.sdpa refuses masks of one dimension
        and case.mask_dtype is None
        and case.dtype in ("float32", "float64")
        and case.key_length > 0
        and (not case.scale or abs(case.scale) >= torch.finfo(torch.float32).tiny)  # F.sdpa gives NaN with is_causal
    )


SHARED = [case for case in CASES if in_torch(case)]


def test_the_shared_cases_cover_the_shared_options() -> None:
    assert len(SHARED) > 60
    for feature in ("causal", "enable_gqa", "scale"):
        assert any(getattr(case, feature) for case in SHARED), feature
    assert {"none", "bool", "float", "inf"} == {case.mask for case in SHARED}


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.name)
def test_the_same_call_gives_the_same_result(case: Case) -> None:
    inputs = case.make()
    arguments: dict[str, Any] = {"is_causal": case.causal, "scale": case.scale, "enable_gqa": case.enable_gqa}
    tensors = (inputs.query, inputs.key, inputs.value, inputs.attn_mask)
    ours = scaledot.scaled_dot_product_attention(*tensors, **arguments)
    theirs = F.scaled_dot_product_attention(*tensors, **arguments)
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert torch.isfinite(theirs).all(), "the case has a row without keys"
    solve(case).check("output", ours)
    tolerance: dict[str, Any] = (
        {"rtol": 1e-4, "atol": 1e-4} if case.dtype == "float32" else {"rtol": 1e-11, "atol": 1e-11}
    )
    torch.testing.assert_close(ours, theirs, **tolerance)
