"""Sizes of zero: batch, lengths, heads, head_dim."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import eager
import reference
import scaledot
from cases import Case
from kernels_under_test import sdpa
from scaledot.explanation import KernelChoice

EMPTY: dict[str, dict[str, Any]] = {
    "batch": dict(batch=(0,)),
    "one_of_two_batches": dict(batch=(2, 0)),
    "query_length": dict(query_length=0),
    "key_length": dict(key_length=0),
    "both_lengths": dict(query_length=0, key_length=0),
    "heads": dict(heads=0),
    "value_dim": dict(value_dim=0),
    "2d": dict(batch=(), heads=None, query_length=0),
    "2d_keys": dict(batch=(), heads=None, key_length=0),
    "gqa": dict(heads=4, kv_heads=2, enable_gqa=True, key_length=0),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": dict(causal=True, causal_alignment="lower_right"),
    "weights": dict(return_weights=True),
    "bool_mask": dict(mask="bool"),
    "float_mask": dict(mask="float"),
    "bias": dict(mask="float", mask_shape="K", return_weights=True),
    "dropout": dict(dropout_p=0.5, return_weights=True),
    "masked_score": dict(mask="bool", masked_score=-5.0),
    "softcap_alibi": dict(softcap=2.0, alibi="H", window=(2, 2)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("size", EMPTY)
def test_results_and_gradients_for_sizes_of_zero(size: str, option: str, dtype: str, kernel: str) -> None:
    options = OPTIONS[option] | EMPTY[size]
    if size.startswith("2d") and option in ("bool_mask", "float_mask", "masked_score"):
        options["mask_shape"] = "QK"
    case = Case(f"empty {size} {option}", dtype=dtype, **options)
    inputs = case.make().requiring_grad()
    output, lse, weights = sdpa(case, inputs)
    assert output.shape == case.output_shape
    assert output.dtype == case.torch_dtype
    assert lse.shape == case.output_shape[:-1]
    assert weights.shape == (case.weights_shape if case.return_weights else (0,))
    if case.key_length == 0:
        assert torch.equal(output, torch.zeros_like(output))
        assert (lse == -math.inf).all()
    gradients = eager.gradients((output, lse, weights), case.cotangents(), inputs.differentiable())
    for name, gradient in gradients.items():
        assert gradient.shape == getattr(inputs, name).shape
        assert torch.isfinite(gradient).all()
        if 0 in (case.key_length, case.query_length) or 0 in case.batch or case.heads == 0:
            assert torch.equal(gradient, torch.zeros_like(gradient)), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_weights_are_uniform_for_a_head_dim_of_zero(dtype: str, kernel: str) -> None:
    """Every score is an empty sum, 0, so for a given scale the weights are uniform."""
    case = Case("head_dim 0", head_dim=0, value_dim=8, scale=1.0, dtype=dtype, return_weights=True)
    inputs = case.make()
    output, lse, weights = sdpa(case, inputs)
    eps = torch.finfo(case.torch_dtype).eps
    torch.testing.assert_close(
        weights.double(), torch.full_like(weights, 1 / 53, dtype=torch.float64), rtol=2 * eps, atol=0
    )
    torch.testing.assert_close(lse.double(), torch.full_like(lse, math.log(53), dtype=torch.float64), rtol=1e-6, atol=0)
    mean = inputs.value.double().mean(-2, keepdim=True).expand(output.shape)
    torch.testing.assert_close(output.double(), mean, rtol=0, atol=4 * eps)


@pytest.mark.parametrize("key_length", [0, 3])
def test_the_gradient_of_a_mask_without_batches_is_zero(key_length: int) -> None:
    case = Case("empty bias", key_length=key_length, mask="float", mask_shape="1HQK", batch=(0,))
    inputs = case.make().requiring_grad()
    gradient = eager.gradients(sdpa(case, inputs), case.cotangents(), inputs.differentiable())["attn_mask"]
    assert torch.equal(gradient, torch.zeros_like(gradient)), "a sum over no batches is 0; the memory must be written"


def test_head_dim_of_zero_without_a_scale() -> None:
    """Results equal those of torch and of the oracle."""
    query, key, value = torch.randn(2, 3, 0), torch.randn(2, 4, 0), torch.randn(2, 4, 5)
    output = scaledot.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(output, value.mean(-2, keepdim=True).expand(output.shape))
    torch.testing.assert_close(output.double(), reference.attention(query, key, value)[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output, torch.nn.functional.scaled_dot_product_attention(query, key, value))


NONE = KernelChoice("none", (), 0)
NO_SCORES = ["batch", "query_length", "key_length", "both_lengths", "heads", "2d", "2d_keys", "gqa"]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("size", NO_SCORES)
def test_explain_says_that_a_call_without_scores_runs_no_kernel(size: str, option: str, grouped: bool) -> None:
    options = OPTIONS[option] | EMPTY[size]
    if size.startswith("2d"):
        options |= dict(mask_shape="QK") if "mask" in option else {}
    elif grouped:
        options["enable_gqa"] = True
    case = Case(f"empty {size} {option}", **options)
    inputs = case.make()
    arguments = case.functional_arguments() | dict(alibi_slopes=inputs.alibi_slopes, attn_mask=inputs.attn_mask)
    found = scaledot.explain(inputs.query, inputs.key, inputs.value, **arguments)
    assert (found.forward, found.backward) == (NONE, NONE)
    assert "  forward   none: there are no scores\n  backward  none: there are no scores" in str(found)


@pytest.mark.parametrize("sizes", [dict(head_dim=0), dict(value_dim=0), dict(head_dim=0, value_dim=0)], ids=str)
def test_explain_names_a_kernel_for_a_width_of_zero(sizes: dict[str, int]) -> None:
    inputs = Case("no width", **sizes).make()
    found = scaledot.explain(inputs.query, inputs.key, inputs.value)
    assert "none" not in (found.forward.kernel, found.backward.kernel)


@pytest.mark.parametrize(("rows", "keys", "heads"), [(5, 5, 0), (0, 5, 2), (5, 0, 2), (0, 0, 0)])
def test_explain_varlen_without_scores(rows: int, keys: int, heads: int) -> None:
    query, key = torch.randn(rows, heads, 8), torch.randn(keys, heads, 8)
    ends = torch.tensor([0, rows]), torch.tensor([0, keys])
    found = scaledot.explain_varlen(query, key, key, *ends, rows, keys, enable_gqa=True)
    assert found.backward is not None
    assert (found.forward.kernels, found.backward.kernels) == ((), ())
    assert "  forward   none: there are no scores\n  backward  none: there are no scores" in str(found)


def test_explain_varlen_without_sequences() -> None:
    nothing, ends = torch.randn(0, 2, 8), torch.tensor([0])
    assert scaledot.explain_varlen(nothing, nothing, nothing, ends, ends, 0, 0).forward.kernels == ()
