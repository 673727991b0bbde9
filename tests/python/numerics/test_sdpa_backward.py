"""Gradients of query, key, value and a float mask: every case, by every kernel, against the float64 oracle."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import eager
from case_list import BY_NAME, CASES
from cases import Case
from kernels_under_test import BOTH, FEW_ROWS, pairs, sdpa
from oracle import solve
from scaledot import save_for_backward, scaled_dot_product_attention
from scaledot.compare import check as rule
from scaledot.compare.features import cases_of
from scaledot.compare.run import make_work
from scaledot.compare.shapes import Entry


def saves_softmax(case: Case) -> bool:
    """Whether a call of the case may keep weights, and so has two ways to its gradients."""
    if case.dtype not in ("float32", "float64") or min(case.query_length, case.key_length) < 32:
        return False
    return case.dropout_p > 0 or case.mask in ("float", "inf") or case.value_dim not in (None, case.head_dim)


@pytest.mark.parametrize(("case", "kernel"), pairs(CASES, BOTH), indirect=["kernel"])
def test_backward(case: Case, kernel: str) -> None:
    inputs, cotangents, solution = case.make().requiring_grad(), case.cotangents(), solve(case)
    for keep in (True, False) if saves_softmax(case) else (True,):
        with save_for_backward(keep):
            gradients = eager.gradients(sdpa(case, inputs), cotangents, inputs.differentiable())
        assert gradients.keys() == solution.gradients.keys()
        for name, gradient in gradients.items():
            assert gradient.dtype == getattr(inputs, name).dtype
            solution.check(name, gradient)


@pytest.mark.parametrize(
    ("shape", "dtype"), [("1x32:1x512x64", "float32"), ("1x32:1x512x128", "float32"), ("1x32:1x520x64", "float64")]
)
def test_gradients_of_keys_shared_by_many_query_heads(shape: str, dtype: str, kernel: str) -> None:
    """Sums of 16384 terms, checked as `python -m scaledot compare` checks them."""
    (case,), _ = cases_of((Entry((shape,), ("gqa",)),), None, (dtype,))
    assert rule.check(make_work(case, torch.device("cpu"), "sdpa"), with_peer=False).problems() == []


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), -1) @ value


def value_gradient(attention: Callable[..., Tensor], tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    query, key, value, flowing = (t.to(dtype).requires_grad_() for t in tensors)
    return torch.autograd.grad(attention(query, key, value), value, flowing)[0]


@pytest.mark.parametrize("kernel", FEW_ROWS, indirect=True)
def test_gradients_of_one_query_have_errors_like_eager_torch(kernel: str) -> None:
    """With one row, rounding errors do not average out: sums in a single chain have 2.5 times eager torch's error."""
    ratios = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(4, length, 128, generator=generator).double() for length in (1, 8192, 8192, 1)]
        exact = value_gradient(plain_attention, tensors, torch.float64)
        ours, theirs = (
            (value_gradient(attention, tensors, torch.float32) - exact).norm().item()
            for attention in (scaled_dot_product_attention, plain_attention)
        )
        ratios.append(ours / theirs)
    assert sum(ratios) / 3 < 2, ratios


ONE_INPUT = (
    "plain-float32",
    "bias-bfloat16",
    "everything-float32",
    "gqa-float16",
    "inf_mask-float64",
    "decode_gqa-float32",
)


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
@pytest.mark.parametrize("case", [BY_NAME[name] for name in ONE_INPUT], ids=lambda case: case.name)
def test_gradient_when_only_one_input_requires_grad(case: Case, name: str, kernel: str) -> None:
    """The gradient has the same bits as when all inputs require grad. For a mask it is the bias-only gradient.

    A mask with a gradient lets short calls save their softmax, which changes the bits of the others.
    """
    inputs, cotangents = case.make(), case.cotangents()
    if getattr(inputs, name) is None:
        assert case.mask == "none"
        assert name == "attn_mask"
        return
    everything = inputs.requiring_grad()
    if everything.attn_mask is not None and name != "attn_mask":
        everything.attn_mask.requires_grad_(False)
    wanted = eager.gradients(sdpa(case, everything), cotangents, everything.differentiable())[name]
    leaf = getattr(inputs, name).detach().requires_grad_()
    setattr(inputs, name, leaf)
    found = eager.gradients(sdpa(case, inputs), cotangents, {name: leaf})[name]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "subset", [("query",), ("key", "value"), ("query", "value"), ("query", "key"), ("key", "attn_mask")]
)
def test_gradients_when_some_inputs_require_grad(subset: tuple[str, ...], kernel: str) -> None:
    case = Case("some inputs", mask="float", return_weights=True, dropout_p=0.2)
    inputs, cotangents, solution = case.make(), case.cotangents(), solve(case)
    for name in subset:
        setattr(inputs, name, getattr(inputs, name).detach().requires_grad_())
    for name, gradient in eager.gradients(sdpa(case, inputs), cotangents, inputs.differentiable()).items():
        solution.check(name, gradient)


@pytest.mark.parametrize("layout", ["contiguous", "blhd", "transposed", "padded"])
def test_gradients_have_the_strides_of_empty_like(layout: str, kernel: str) -> None:
    case = Case("strides", layout=layout)
    inputs = case.make().requiring_grad()
    leaves = inputs.differentiable()
    gradients = eager.gradients(sdpa(case, inputs), case.cotangents(), leaves)
    for name, gradient in gradients.items():
        assert gradient.stride() == torch.empty_like(leaves[name]).stride()


def test_backward_twice_accumulates(kernel: str) -> None:
    case = Case("twice", mask="float", mask_shape="1HQK")
    inputs = case.make().requiring_grad()
    output = sdpa(case, inputs)[0]
    torch.autograd.backward(output.sum(), retain_graph=True)
    once = {name: t.grad.clone() for name, t in inputs.differentiable().items() if t.grad is not None}
    torch.autograd.backward(output.sum())
    for name, t in inputs.differentiable().items():
        assert t.grad is not None
        assert torch.equal(t.grad, 2 * once[name])


def test_an_input_changed_in_place_is_an_error(kernel: str) -> None:
    case = Case("in place")
    inputs = case.make().requiring_grad()
    output = sdpa(case, inputs)[0]
    with torch.no_grad():
        inputs.value.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(output.sum())


def test_a_large_mask_gradient_by_non_temporal_stores(kernel: str) -> None:
    """Kernels use such stores from 4 MiB on. With 1028 keys, rows are not aligned and end in part of a vector."""
    for length in (1024, 1028):
        query, key, value = torch.randn(3, 1, 1, length, 8).unbind()
        mask = torch.randn(1, 1, length, length, requires_grad=True)
        output = torch.ops.scaledot.sdpa(query, key, value, mask, is_causal=True)[0]
        (found,) = torch.autograd.grad(output.sum(), mask)
        exact = mask.detach().double().requires_grad_()
        live = torch.ones(length, length, dtype=torch.bool).tril()
        scores = query.double() @ key.double().mT / math.sqrt(8) + exact
        weights = scores.masked_fill(~live, -torch.inf).softmax(-1)
        (wanted,) = torch.autograd.grad((weights @ value.double()).sum(), exact)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-6)
        assert found[..., ~live].count_nonzero() == 0


def test_a_row_with_one_key_has_a_query_gradient_of_zero(kernel: str) -> None:
    """The weight of the only key is 1 whatever its score, so dP - delta is 0 except for rounding errors."""
    query, key, value, grad = torch.randn(4, 1, 2, 700, 128, generator=torch.Generator().manual_seed(1))
    query.requires_grad_()
    torch.ops.scaledot.sdpa(query, key, value, is_causal=True)[0].backward(grad)
    first, largest = query.grad[..., 0, :].abs().max(), query.grad.abs().max()
    assert first <= 2 * torch.finfo(torch.float32).eps * largest
