"""torch.library.opcheck on every op: schema, autograd registration, fake tensors, ahead-of-time dispatch."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.library import opcheck

from cases import Case
from kernels_under_test import sdpa
from op_calls import tensor_ops

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": dict(return_weights=True),
    "causal_bias": dict(causal=True, mask="float", mask_shape="1HQK", return_weights=True),
    "bool_mask": dict(mask="bool", masked_score=-3.0),
    "dropout": dict(dropout_p=0.3, return_weights=True),
    "window_softcap_alibi": dict(window=(3, 2), softcap=2.0, alibi="H", scale=0.3),
    "relative": dict(relative="H", relative_reach=3, return_weights=True),
    "relative_batch": dict(relative="B1", relative_reach=9, causal_alignment="lower_right", dtype="bfloat16"),
    "blocks": dict(blocks="1H", block_size=(2, 3), causal=True, return_weights=True),
    "gqa": dict(heads=4, kv_heads=2, enable_gqa=True, value_dim=6),
    "2d": dict(batch=(), heads=None),
    "3d": dict(batch=()),
    "5d": dict(batch=(2, 1)),
    "broadcast": dict(batch=(3,), key_batch=(1,), value_batch=(1,)),
    "blhd": dict(layout="blhd"),
    "bfloat16": dict(dtype="bfloat16"),
    "empty": dict(key_length=0),
}


def small(name: str) -> Case:
    return Case(f"opcheck {name}", **{**dict(query_length=5, key_length=7, head_dim=4), **OPTIONS[name]})


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_sdpa(name: str, requires_grad: bool) -> None:
    case = small(name)
    inputs = case.make()
    # opcheck clones its arguments with their strides, so they must own their memory.
    inputs = inputs.mapped(lambda t: t.clone(memory_format=torch.preserve_format))
    if requires_grad:
        inputs = inputs.requiring_grad()
    opcheck(
        torch.ops.scaledot.sdpa.default,
        tuple(inputs.tensors().values()),
        dict(**case.options(), return_weights=case.return_weights),
    )


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_sdpa_backward(name: str, requires_grad: bool) -> None:
    case = small(name)
    inputs = case.make().mapped(lambda t: t.clone())
    output, lse, weights = sdpa(case, inputs)
    cotangents = case.cotangents()
    if requires_grad:
        inputs = inputs.requiring_grad()
    wants_relative = inputs.relative_bias is not None
    wants_mask = inputs.attn_mask is not None and inputs.attn_mask.is_floating_point()
    opcheck(
        torch.ops.scaledot.sdpa_backward.default,
        (
            *(None if t is None else t.clone() for t in vars(cotangents).values()),
            *inputs.tensors().values(),
            output,
            lse,
            weights if case.return_weights else None,
            None,
        ),
        {
            **case.options(),
            "part": None,
            "saved_keys": None,
            "output_mask": [True, True, True, wants_mask, wants_relative, False],
        },
    )


@pytest.mark.parametrize("name", ["plain", "window_softcap_alibi", "causal_bias", "2d", "5d"])
def test_sdpa_mask(name: str) -> None:
    case = small(name)
    inputs = case.make().mapped(lambda t: t.clone())
    opcheck(
        torch.ops.scaledot.sdpa_mask.default,
        (inputs.query, inputs.key, inputs.alibi_slopes),
        case.position_options(),
    )


@pytest.mark.parametrize("requires_grad", [False, True])
def test_sdpa_output(requires_grad: bool) -> None:
    tensors = tuple(torch.randn(2, 3, 5, 8, requires_grad=requires_grad) for _ in range(3))
    opcheck(torch.ops.scaledot.sdpa_output.default, tensors, {"is_causal": True})


def test_dropout_mask() -> None:
    opcheck(torch.ops.scaledot.dropout_mask.default, (torch.tensor([1, 2]), 2, 3, 4, 5, 0.5))


def test_every_op_is_checked_here() -> None:
    names = set(tensor_ops())
    varlen = ("varlen", "varlen_recorded", "varlen_backward", "explain_varlen")  # in test_varlen_torch
    into = ("sdpa_out", "varlen_out")  # in test_out
    dense = ("sdpa", "sdpa_recorded", "sdpa_output", "sdpa_backward", "sdpa_mask", "dropout_mask", "explain")
    assert names == {f"scaledot::{name}" for name in (*dense, *varlen, *into)}
