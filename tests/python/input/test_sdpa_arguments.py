"""Tensors of every permitted rank, dtype and kind: what may be mixed, and what autograd sees of it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import scaledot
from cases import Case
from eager import alibi_bias, gradients
from kernels_under_test import FEW_ROWS, GENERAL, sdpa

RANKS: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = [
    ((5, 4), (3, 7, 4), (3, 7, 6)),
    ((5, 4), (2, 3, 7, 4), (7, 4)),
    ((3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)),
    ((3, 5, 4), (7, 4), (7, 6)),
    ((2, 3, 5, 4), (7, 4), (3, 7, 4)),
    ((2, 2, 3, 5, 4), (3, 7, 4), (2, 3, 7, 4)),
]


@pytest.mark.parametrize("shapes", RANKS, ids=str)
def test_ranks_broadcast_as_in_torch(shapes: tuple[tuple[int, ...], ...], kernel: str) -> None:
    found: list[list[Tensor]] = []
    for function in (scaledot.scaled_dot_product_attention, F.scaled_dot_product_attention):
        torch.manual_seed(0)
        leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        query, key, value = leaves
        output = function(query, key, value)
        found.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("mask_dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_a_mask_of_any_floating_dtype_is_read_exactly(dtype: str, mask_dtype: str, kernel: str) -> None:
    """Its values are converted to the dtype of the scores without loss; its gradient has the dtype of the mask."""
    case = Case(f"mask {mask_dtype}", dtype=dtype, mask="inf", mask_dtype=mask_dtype, mask_shape="HQK")
    inputs = case.make().requiring_grad()
    widened = case.make()
    assert inputs.attn_mask is not None
    compute = torch.float64 if dtype == "float64" else torch.float32
    widened.attn_mask = inputs.attn_mask.detach().to(compute)
    results = sdpa(case, inputs)
    assert torch.equal(results[0], sdpa(case, widened)[0])
    widened = widened.requiring_grad()
    found = gradients(results, case.cotangents(), inputs.differentiable())
    wanted = gradients(sdpa(case, widened), case.cotangents(), widened.differentiable())
    for name in ("query", "key", "value"):
        assert torch.equal(found[name], wanted[name])
    assert found["attn_mask"].dtype == inputs.attn_mask.dtype
    torch.testing.assert_close(found["attn_mask"], wanted["attn_mask"].to(inputs.attn_mask.dtype))


@pytest.mark.parametrize("kernel", GENERAL + FEW_ROWS, indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_slopes_of_every_dtype_sign_and_stride(dtype: str, kernel: str) -> None:
    """They have the effect of the bias that they describe."""
    case = Case("slopes", dtype=dtype, heads=3, query_length=7, key_length=40, causal_alignment="lower_right")
    inputs = case.make()
    values = torch.tensor([0.25, -0.5, 0.0])  # exact in every dtype
    spread = torch.full((2, 9), math.nan)
    spread[:, 1::3] = values
    for slopes in (values, values.double(), values.to(case.torch_dtype), values[:1].expand(3), spread[:, 1::3]):
        inputs.attn_mask, inputs.alibi_slopes = None, slopes
        found = sdpa(case, inputs)[0]
        inputs.attn_mask, inputs.alibi_slopes = alibi_bias(case, slopes.double(), 7, 40).to(case.torch_dtype), None
        wanted = sdpa(case, inputs)[0]
        eps = torch.finfo(case.torch_dtype).eps
        torch.testing.assert_close(found, wanted, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_dimensions_in_any_order_in_memory(dtype: str, kernel: str) -> None:
    case = Case("swapped", batch=(2, 3, 2), query_length=9, key_length=12, mask="float", dtype=dtype, dropout_p=0.2)
    inputs = case.make()
    wanted = sdpa(case, inputs)[0]
    for order in ((1, 0, 2), (2, 1, 0), (0, 2, 1)):

        def reordered(tensor: Tensor, order: tuple[int, ...] = order) -> Tensor:
            if tensor.dim() == 1:
                return tensor
            back = [order.index(d) for d in range(3)]
            return tensor.permute(*order, 3, 4, 5).contiguous().permute(*back, 3, 4, 5)

        assert torch.equal(sdpa(case, inputs.mapped(reordered))[0], wanted)


def test_overlapping_and_negated_views(kernel: str) -> None:
    case = Case("views", batch=(), heads=2, query_length=6, key_length=9, head_dim=5)
    inputs = case.make()
    wide = torch.randn(2, 13)
    inputs.key = wide.unfold(-1, 5, 1)  # (2, 9, 5), every element in up to five rows
    dense = inputs.mapped(lambda t: t.clone())
    assert torch.equal(sdpa(case, inputs)[0], sdpa(case, dense)[0])
    inputs.query = torch._neg_view(dense.query)
    dense.query = -dense.query
    assert torch.equal(sdpa(case, inputs)[0], sdpa(case, dense)[0])


def test_gradients_of_parts_of_one_projection(kernel: str) -> None:
    """query, key and value are views of one tensor, as in a packed projection; its gradient is the sum of all three."""
    packed = torch.randn(2, 11, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    case = Case("packed", dtype="float64", causal=True)
    found = []
    for function in (scaledot.scaled_dot_product_attention, F.scaled_dot_product_attention):
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind()
        output = function(query, key, value, is_causal=case.causal)
        found.append(torch.autograd.grad(output.transpose(1, 2).flatten(2).square().sum(), packed)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-11, atol=1e-12)


def test_one_tensor_for_all_three(kernel: str) -> None:
    x = torch.randn(2, 3, 11, 8, dtype=torch.float64, requires_grad=True)
    found = []
    for function in (scaledot.scaled_dot_product_attention, F.scaled_dot_product_attention):
        found.append(torch.autograd.grad(function(x, x, x).square().sum(), x)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-11, atol=1e-12)


def test_a_result_changed_in_place_is_caught(kernel: str) -> None:
    """The backward needs the output, so torch raises an error if it was changed."""
    inputs = (case := Case("result in place")).make().requiring_grad()
    output = sdpa(case, inputs)[0]
    output.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(output.sum())


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_finds_nothing_in_empty_rows(kernel: str) -> None:
    case = Case("anomaly", mask="inf", empty_rows=True, return_weights=True, dropout_p=0.2)
    inputs = case.make().requiring_grad()
    with torch.autograd.detect_anomaly():
        gradients(sdpa(case, inputs), case.cotangents(), inputs.differentiable())
        output, _, weights = sdpa(case, inputs)
        first = torch.autograd.grad((output.square().sum() + weights.sum()), inputs.query, create_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), inputs.query)[0]
    assert torch.isfinite(second).all()
