"""NaN and inf: those of masked keys must not reach any row, all others must."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import eager
from cases import DTYPES, Case, Inputs
from kernels_under_test import EVERY_KERNEL, assert_runs, sdpa, sized
from layouts import place
from oracle import eager_attention
from tolerances import kind

# With a padding option, no row attends to the keys from HIDDEN_FROM on. With the others only the last rows do.
HIDDEN: dict[str, dict[str, Any]] = {
    "padding": dict(mask="bool", mask_shape="111K"),
    "padding_inf": dict(mask="inf", mask_shape="111K"),
    "padding_rows": dict(mask="bool", mask_shape="BHQK"),
    "bool": dict(mask="bool", mask_shape="QK"),
    "inf": dict(mask="inf", mask_shape="HQK"),
    "causal": dict(causal=True),
    "window": dict(window=(None, 0)),
    "causal_mask": dict(causal=True, mask="float"),
    "softcap_alibi": dict(causal=True, softcap=2.0, alibi="H"),
    "dropout": dict(causal=True, dropout_p=0.3),
    "gqa": dict(causal=True, heads=4, kv_heads=2, enable_gqa=True),
}
HIDDEN_FROM = 40  # inside a tile of every kernel


def hide(case: Case, inputs: Inputs) -> int:
    """Makes the mask hide the keys from HIDDEN_FROM on; returns the first row that attends to one of them."""
    mask = inputs.attn_mask
    by_position = HIDDEN_FROM - (case.key_length - case.query_length)  # the alignment is lower_right
    if mask is None or case.causal:
        return by_position
    masked = False if mask.dtype == torch.bool else -math.inf
    if case.name.startswith("hidden padding"):
        mask[..., HIDDEN_FROM:] = masked
        return case.query_length
    mask[..., :by_position, HIDDEN_FROM:] = masked
    mask[..., by_position:, HIDDEN_FROM] = True if mask.dtype == torch.bool else 0.0
    return by_position


@EVERY_KERNEL
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", HIDDEN)
def test_nonfinite_masked_keys_and_values_change_nothing(way: str, dtype: str, poison: float, kernel: str) -> None:
    """Rows that do not attend to a key have the same bits whether that key is finite or not."""
    options: dict[str, Any] = dict(query_length=70, key_length=70, causal_alignment="lower_right", return_weights=True)
    few = (4, 42) if way == "gqa" else (8, 44)  # two query heads share a KV head: 8 rows
    case = sized(Case(f"hidden {way}", dtype=dtype, **{**options, **HIDDEN[way]}), kernel, few)
    clean = case.make()
    seen_from = hide(case, clean)
    assert 0 < seen_from <= case.query_length
    assert_runs(kernel, case, clean)
    poisoned = clean.mapped(lambda t: t)
    poisoned.key, poisoned.value = place(clean.key), place(clean.value)
    poisoned.key[..., HIDDEN_FROM:, :] = poison
    poisoned.value[..., HIDDEN_FROM:, :] = poison
    cotangents = case.cotangents()
    found = []
    for inputs in (clean, poisoned):
        inputs = inputs.requiring_grad()
        results = sdpa(case, inputs)
        found.append((*results, eager.gradients(results, cotangents, inputs.differentiable())))
    (output, lse, weights, grads), (output_p, lse_p, weights_p, grads_p) = found
    rows = slice(0, seen_from)
    assert torch.equal(output[..., rows, :], output_p[..., rows, :])
    assert torch.equal(lse[..., rows], lse_p[..., rows])
    if case.return_weights:
        assert torch.equal(weights[..., rows, :], weights_p[..., rows, :])
    assert torch.equal(grads["query"][..., rows, :], grads_p["query"][..., rows, :])
    if seen_from == case.query_length:
        for name in grads:
            assert torch.equal(grads[name], grads_p[name]), name
        for name in ("key", "value"):
            hidden = grads_p[name][..., HIDDEN_FROM:, :]
            assert torch.equal(hidden, torch.zeros_like(hidden)), name
    elif not math.isinf(poison):
        assert torch.isnan(output_p[..., seen_from:, :]).all()
        assert torch.isnan(lse_p[..., seen_from:]).all()
        assert torch.isnan(grads_p["query"][..., seen_from:, :]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_nan_query_reaches_only_the_gradients_of_its_keys(dtype: str, kernel: str) -> None:
    """Row 5 is NaN and attends to keys 0..5. Gradients of later keys are as if the row were 0."""
    case = Case("poisoned query", query_length=50, key_length=50, causal=True, dtype=dtype)
    clean = case.make()
    assert_runs(kernel, case, clean)
    clean.query[..., 5, :] = 0
    poisoned = clean.mapped(lambda t: t)
    poisoned.query = place(clean.query)
    poisoned.query[..., 5, :] = math.nan
    found = []
    for inputs in (clean, poisoned):
        inputs = inputs.requiring_grad()
        found.append(eager.gradients(sdpa(case, inputs), case.cotangents(), inputs.differentiable()))
    for name in ("key", "value"):
        assert torch.equal(found[0][name][..., 6:, :], found[1][name][..., 6:, :])
        assert torch.isnan(found[1][name][..., :6, :]).all()


def poison_live(where: str, value: float, inputs: Inputs) -> None:
    if where == "query":
        inputs.query[0, 1, 3, 2] = value
    elif where == "key":
        inputs.key[1, 0, 7, 1] = value
    elif where == "value":
        inputs.value[1, 1, 9, 4] = value
    else:
        assert inputs.attn_mask is not None
        inputs.attn_mask[0, 1, 2, 6] = value


@EVERY_KERNEL
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["query", "key", "value", "attn_mask"])
def test_nan_and_inf_that_are_not_masked_reach_the_results(where: str, value: float, dtype: str, kernel: str) -> None:
    """Results are non-finite exactly where those of eager attention are."""
    options: dict[str, Any] = dict(mask="float", return_weights=True, query_length=20, key_length=24)
    case = sized(Case(f"live {where}", dtype=dtype, **options), kernel, (5, 24))
    inputs = case.make()
    poison_live(where, value, inputs)
    assert_runs(kernel, case, inputs)
    wide = inputs.mapped(lambda t: t.double())
    names = ("output", "lse", "weights") if case.return_weights else ("output", "lse")
    for name, ours, wanted in zip(names, sdpa(case, inputs), eager_attention(case, wide), strict=False):
        assert torch.equal(kind(ours), kind(wanted)), name
        assert math.isinf(value) or torch.equal(torch.isnan(ours), torch.isnan(wanted)), name


@pytest.mark.parametrize("where", ["query", "key", "value", "attn_mask"])
def test_nan_that_is_not_masked_reaches_the_gradients_of_its_head(where: str, kernel: str) -> None:
    case = Case(f"live back {where}", mask="float", query_length=20, key_length=24)
    inputs = case.make()
    poison_live(where, math.nan, inputs)
    inputs = inputs.requiring_grad()
    gradients = eager.gradients(sdpa(case, inputs), case.cotangents(), inputs.differentiable())
    head = {"query": (0, 1), "key": (1, 0), "value": (1, 1), "attn_mask": (0, 1)}[where]
    assert torch.isnan(gradients["query"][head]).any()
    for name, gradient in gradients.items():
        other = torch.ones(2, 2, dtype=torch.bool)
        other[head] = False
        assert torch.isfinite(gradient[other]).all(), f"{name} of another head"
