"""gradcheck and gradgradcheck in float64, with every option that affects the gradient."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from cases import Case, Inputs
from kernels_under_test import sdpa

TINY: dict[str, Any] = dict(batch=(2,), heads=2, query_length=3, key_length=4, head_dim=3, value_dim=2, dtype="float64")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": dict(causal=True),
    "lower_right": dict(causal=True, causal_alignment="lower_right", query_length=5),
    "window": dict(window=(1, 1)),
    "softcap": dict(softcap=0.8),
    "alibi": dict(alibi="H"),
    "alibi_batch": dict(alibi="BH", softcap=1.5),
    "relative": dict(relative="H", relative_reach=1),
    "relative_batch": dict(relative="BH", relative_reach=4, causal_alignment="lower_right"),
    "relative_shared": dict(relative="1", relative_reach=2, mask="bool", empty_rows=True),
    "bool_mask": dict(mask="bool", empty_rows=True),
    "masked_score": dict(mask="bool", masked_score=-0.5),
    "float_mask": dict(mask="float"),
    "bias": dict(mask="float", mask_shape="1HQK"),
    "row_mask": dict(mask="float", mask_shape="Q1"),
    "key_mask": dict(mask="float", mask_shape="B11K"),
    "dropout": dict(dropout_p=0.4),
    "gqa": dict(heads=4, kv_heads=2, batch=(1,), enable_gqa=True),
    "one_kv_head": dict(kv_heads=1),
    "one_query_head": dict(query_heads=1),
    "one_key_batch": dict(key_batch=(1,), value_batch=()),
    "one_query_batch": dict(query_batch=(1,), mask="float"),
    "2d": dict(batch=(), heads=None),
    "3d": dict(batch=()),
    "5d": dict(batch=(2, 1), heads=1),
    "scale": dict(scale=1.3),
    "transposed": dict(layout="transposed"),
    "everything": dict(
        heads=2,
        kv_heads=1,
        enable_gqa=True,
        batch=(1,),
        mask="float",
        causal=True,
        causal_alignment="lower_right",
        softcap=1.2,
        alibi="H",
        relative="B1",
        relative_reach=2,
        dropout_p=0.3,
        scale=0.9,
    ),
}


def function_of(case: Case, inputs: Inputs) -> tuple[Any, tuple[Tensor, ...]]:
    """The call as a function of its differentiable tensors, and those tensors."""
    leaves = inputs.requiring_grad().differentiable()

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        arguments: dict[str, Any] = inputs.tensors() | dict(zip(leaves, tensors, strict=True))
        changed = Inputs(**arguments)
        output, lse, weights = sdpa(case, changed)
        # A row without keys has lse -inf, whose difference quotient is NaN.
        lse = torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)
        return (output, lse, weights) if case.return_weights else (output, lse)

    return call, tuple(leaves.values())


def make(name: str, return_weights: bool) -> Case:
    return Case(f"gradcheck {name}", return_weights=return_weights, **{**TINY, **OPTIONS[name]})


@pytest.mark.parametrize("return_weights", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck(name: str, return_weights: bool, kernel: str) -> None:
    case = make(name, return_weights)
    inputs = case.make()
    call, leaves = function_of(case, inputs)
    assert gradcheck(call, leaves, fast_mode=False)


@pytest.mark.parametrize("return_weights", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradgradcheck(name: str, return_weights: bool) -> None:
    case = make(name, return_weights)
    call, leaves = function_of(case, case.make())
    assert gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("name", ["plain", "everything", "masked_score", "one_query_batch"])
def test_gradgradcheck_of_every_element(name: str) -> None:
    """Checks every element of the second derivative. The fast mode checks random projections."""
    case = make(name, True)
    call, leaves = function_of(case, case.make())
    assert gradgradcheck(call, leaves, fast_mode=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_double_backward_in_other_dtypes(dtype: str) -> None:
    """Compares a gradient penalty with the one in float64."""

    def penalty(case: Case) -> tuple[Tensor, ...]:
        inputs = Case(case.name).make().requiring_grad()
        leaves = [t.detach().to(case.torch_dtype).requires_grad_() for t in (inputs.query, inputs.key, inputs.value)]
        output = sdpa(case, Inputs(*leaves))[0]
        grads = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(torch.stack([g.square().sum() for g in grads]).sum(), leaves)

    exact = penalty(Case("penalty", dtype="float64", causal=True))
    for ours, wanted in zip(penalty(Case("penalty", dtype=dtype, causal=True)), exact, strict=True):
        assert ours.dtype == getattr(torch, dtype)
        relative = (ours.double() - wanted).norm() / wanted.norm()
        assert relative < (1e-5 if dtype == "float32" else 4e-2)


def test_gradgradcheck_of_the_gradient() -> None:
    case = make("plain", False)
    call, leaves = function_of(case, case.make())

    def gradient(*tensors: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(*tensors)[0].square().sum(), tensors, create_graph=True)

    assert gradgradcheck(gradient, leaves, fast_mode=True)


def test_double_backward_replays_dropout() -> None:
    """The second derivative uses the mask that the forward drew: a dropped weight stays dropped."""
    case = make("dropout", True).with_(dropout_p=0.6)
    inputs = case.make().requiring_grad()
    weights = sdpa(case, inputs)[2]
    (grad,) = torch.autograd.grad(weights.square().sum(), inputs.query, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), inputs.query)
    assert second.abs().sum() > 0
    dropped_rows = (weights == 0).all(-1)
    assert torch.equal(second[dropped_rows], torch.zeros_like(second[dropped_rows]))
