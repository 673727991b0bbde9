"""Rows with nothing to attend to, masked keys that hold NaN or inf, and live NaN and inf, which must show."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

import math
from typing import Any

import eager
import pytest
import torch
from cases import Case, Inputs
from layouts import place
from oracle import eager_attention, solve
from ours import require, sdpa
from tolerances import check, kind
from torch import Tensor

DTYPE_NAMES = ["float32", "float64", "bfloat16", "float16"]

# Every way in which a whole row can be masked: the options, and how many of the first rows it empties.
EMPTY_ROWS: dict[str, tuple[dict[str, Any], int]] = {
    "bool": (dict(mask="bool", mask_shape="QK"), 70),
    "bool_rows": (dict(mask="bool", mask_shape="Q1"), 70),
    "padding": (dict(mask="bool", mask_shape="111K"), 70),
    "inf": (dict(mask="inf", mask_shape="QK"), 70),
    "inf_rows": (dict(mask="inf", mask_shape="BHQ1"), 70),
    "lower_right": (dict(causal=True, causal_alignment="lower_right"), 37),
    "window": (dict(window=(3, None), causal=True, causal_alignment="lower_right"), 37),
    "chunked": (dict(pattern="chunked", pattern_args=(37,), causal_alignment="lower_right"), 37),
}


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("way", EMPTY_ROWS)
def test_rows_with_nothing_to_attend_to(way: str, dtype: str, kernel: str) -> None:
    """Output 0, weights 0, gradient 0, lse -inf, whatever flows back."""
    options, empty = EMPTY_ROWS[way]
    case = Case(f"empty {way}", query_length=70, key_length=33, dtype=dtype, return_weights=True, **options)
    inputs = case.make()
    if inputs.attn_mask is not None:
        inputs.attn_mask.fill_(False if case.mask == "bool" else -math.inf)
    inputs = inputs.requiring_grad()
    require(kernel, case, inputs, ("forward", "backward"))
    output, lse, weights = sdpa(case, inputs)
    for result in (output, weights):
        assert torch.equal(result[..., :empty, :], torch.zeros_like(result[..., :empty, :]))
        assert torch.isfinite(result).all()
    assert (lse[..., :empty] == -math.inf).all()
    assert torch.isfinite(lse[..., empty:]).all()
    gradients = eager.gradients((output, lse, weights), case.cotangents(), inputs.differentiable())
    assert torch.equal(
        gradients["query"][..., :empty, :], torch.zeros_like(gradients["query"][..., :empty, :])
    )
    for name, gradient in gradients.items():
        assert torch.isfinite(gradient).all(), name
        if empty == 70:
            assert torch.equal(gradient, torch.zeros_like(gradient)), name
        else:
            assert gradient.abs().sum() > 0, name


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("score", [-1e9, -3.0, 0.0, 5.0])
def test_finite_masked_score_makes_empty_rows_uniform(score: float, dtype: str, kernel: str) -> None:
    case = Case(
        "uniform", mask="bool", mask_shape="11Q1", masked_score=score, dtype=dtype, return_weights=True
    )
    inputs = case.make()
    assert inputs.attn_mask is not None
    inputs.attn_mask.fill_(False)
    require(kernel, case, inputs, ("forward",))
    output, lse, weights = sdpa(case, inputs)
    uniform = torch.full_like(weights, 1 / case.key_length, dtype=torch.float64)
    mean = inputs.value.double().mean(-2, keepdim=True).expand(output.shape)
    eps = torch.finfo(case.torch_dtype).eps
    torch.testing.assert_close(weights.double(), uniform, rtol=4 * eps, atol=0)
    torch.testing.assert_close(output.double(), mean, rtol=0, atol=4 * eps)
    torch.testing.assert_close(
        lse.double(), torch.full_like(lse, score + math.log(53), dtype=torch.float64), rtol=1e-6, atol=1e-6
    )


# Options, and which keys no row attends to (padding) or only rows from 40 on (the others).
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
FROM = 40  # the first hidden key, inside a tile of every kernel


def hide(case: Case, inputs: Inputs) -> int:
    """Makes the mask hide the keys from FROM on; returns the first row that sees one of them."""
    mask = inputs.attn_mask
    if mask is None or case.causal:
        return FROM
    masked = False if mask.dtype == torch.bool else -math.inf
    if mask.size(-2) == 1 or case.name.startswith("hidden padding"):
        mask[..., FROM:] = masked
        return case.query_length
    mask[..., :FROM, FROM:] = masked
    return FROM


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("way", HIDDEN)
def test_masked_keys_and_values_are_never_seen(way: str, dtype: str, poison: float, kernel: str) -> None:
    """Rows that do not attend to a key give bitwise what they give when that key and value are ordinary
    numbers."""
    case = Case(
        f"hidden {way}", query_length=70, key_length=70, dtype=dtype, return_weights=True, **HIDDEN[way]
    )
    clean = case.make()
    seen_from = hide(case, clean)
    require(kernel, case, clean, ("forward", "backward"))
    poisoned = clean.mapped(lambda t: t)
    poisoned.key, poisoned.value = place(clean.key), place(clean.value)
    poisoned.key[..., FROM:, :] = poison
    poisoned.value[..., FROM:, :] = poison
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
    assert torch.equal(weights[..., rows, :], weights_p[..., rows, :])
    assert torch.equal(grads["query"][..., rows, :], grads_p["query"][..., rows, :])
    if seen_from == case.query_length:
        for name in grads:
            assert torch.equal(grads[name], grads_p[name]), name
        for name in ("key", "value"):
            hidden = grads_p[name][..., FROM:, :]
            assert torch.equal(hidden, torch.zeros_like(hidden)), name
    elif not math.isinf(poison):
        assert torch.isnan(output_p[..., seen_from:, :]).all()
        assert torch.isnan(lse_p[..., seen_from:]).all()
        assert torch.isnan(grads_p["query"][..., seen_from:, :]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_poisoned_query_reaches_only_the_keys_it_attends_to(dtype: str, kernel: str) -> None:
    """Backward: row 5 is NaN and attends to keys 0..5, so the gradients of the later keys are those of a zero
    row."""
    case = Case("poisoned query", query_length=50, key_length=50, causal=True, dtype=dtype)
    clean = case.make()
    require(kernel, case, clean, ("forward", "backward"))
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


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["query", "key", "value", "attn_mask"])
def test_live_nan_and_inf_are_passed_on(where: str, value: float, dtype: str, kernel: str) -> None:
    """Non-finite results exactly where eager attention has them."""
    case = Case(
        f"live {where}", mask="float", dtype=dtype, return_weights=True, query_length=20, key_length=24
    )
    inputs = case.make()
    poison_live(where, value, inputs)
    require(kernel, case, inputs, ("forward",))
    wide = inputs.mapped(lambda t: t.double())
    for name, ours, wanted in zip(
        ("output", "lse", "weights"), sdpa(case, inputs), eager_attention(case, wide), strict=True
    ):
        assert torch.equal(kind(ours), kind(wanted)), name
        assert math.isinf(value) or torch.equal(torch.isnan(ours), torch.isnan(wanted)), name


@pytest.mark.parametrize("where", ["query", "key", "value", "attn_mask"])
def test_live_nan_is_passed_back(where: str, kernel: str) -> None:
    case = Case(f"live back {where}", mask="float", query_length=20, key_length=24)
    inputs = case.make()
    poison_live(where, math.nan, inputs)
    inputs = inputs.requiring_grad()
    gradients = eager.gradients(sdpa(case, inputs), case.cotangents(), inputs.differentiable())
    plane = {"query": (0, 1), "key": (1, 0), "value": (1, 1), "attn_mask": (0, 1)}[where]
    assert torch.isnan(gradients["query"][plane]).any()
    for name, gradient in gradients.items():
        other = torch.ones(2, 2, dtype=torch.bool)
        other[plane] = False
        assert torch.isfinite(gradient[other]).all(), f"{name} of another head"


@pytest.mark.parametrize("kind_of_mask", ["bool", "float", "inf"])
@pytest.mark.parametrize("shape", ["K", "Q1", "111K", "B11K", "H1K", "1HQ1"])
def test_a_broadcast_mask_is_the_expanded_mask(shape: str, kind_of_mask: str, kernel: str) -> None:
    case = Case(f"broadcast {shape}", mask=kind_of_mask, mask_shape=shape, query_length=67, key_length=130)
    inputs = case.make()
    assert inputs.attn_mask is not None
    expanded = inputs.mapped(lambda t: t)
    view = inputs.attn_mask.expand(case.weights_shape)
    dense = inputs.mapped(lambda t: t)
    dense.attn_mask = place(view, "padded")
    expanded.attn_mask = view
    wanted = sdpa(case, inputs)[0]
    assert torch.equal(sdpa(case, expanded)[0], wanted)
    assert torch.equal(sdpa(case, dense)[0], wanted)


def test_gradient_of_a_broadcast_mask_is_the_sum(kernel: str) -> None:
    case = Case("mask sum", mask="float", mask_shape="BHQK", dtype="float64", batch=(3,))
    inputs = case.make()
    assert inputs.attn_mask is not None
    for shape in ((53,), (1, 53), (37, 1), (2, 1, 1), (1, 1, 37, 53), (3, 1, 1, 53), (2, 37, 53), (1,), ()):
        leaf = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        full = torch.zeros(case.weights_shape, dtype=torch.float64, requires_grad=True)
        found: list[Tensor] = []
        for mask in (leaf, full):
            changed = inputs.mapped(lambda t: t)
            changed.attn_mask = mask
            found.append(
                eager.gradients(sdpa(case, changed), case.cotangents(), {"attn_mask": mask})["attn_mask"]
            )
        torch.testing.assert_close(
            found[0], found[1].sum_to_size(shape) if shape else found[1].sum(), rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize("alignment", ["upper_left", "lower_right"])
@pytest.mark.parametrize("sizes", [(1, 1), (7, 7), (3, 9), (9, 3), (1, 5), (64, 70)])
def test_position_masks_of_the_op(sizes: tuple[int, int], alignment: str) -> None:
    """scaledot::sdpa_mask, which the double backward uses, against the documentation's formulas."""
    options: list[dict[str, Any]] = [
        {},
        dict(causal=True),
        dict(window=(0, 0)),
        dict(window=(2, None)),
        dict(window=(None, 1)),
        dict(window=(3, 2), causal=True),
        dict(pattern="chunked", pattern_args=(3,)),
        dict(pattern="prefix", pattern_args=(2,)),
        dict(pattern="prefix", pattern_args=(4,), window=(2, 2)),
    ]
    for option in options:
        for alibi in ("none", "H", "BH"):
            case = Case(
                "positions",
                query_length=sizes[0],
                key_length=sizes[1],
                causal_alignment=alignment,
                alibi=alibi,
                **option,
            )
            inputs = case.make()
            attends, bias = torch.ops.scaledot.sdpa_mask(
                inputs.query, inputs.key, inputs.alibi_slopes, **case.position_options()
            )
            assert torch.equal(attends, eager.attends_by_position(case, *sizes)), option
            if inputs.alibi_slopes is None:
                assert bias.shape == (0,)
            else:
                wanted = eager.alibi_bias(case, inputs.alibi_slopes, *sizes)
                torch.testing.assert_close(bias.expand(case.weights_shape), wanted.expand(case.weights_shape))


def test_single_query_backward_with_a_mask(kernel: str) -> None:
    case = Case(
        "single query", query_length=1, key_length=192, mask="float", mask_shape="B11K", return_weights=True
    )
    inputs, solution = case.make().requiring_grad(), solve(case)
    gradients = eager.gradients(sdpa(case, inputs), case.cotangents(), inputs.differentiable())
    for name, gradient in gradients.items():
        check(
            name,
            gradient,
            solution.gradients[name],
            solution.eager_error[name],
            gradient=True,
            terms=solution.terms[name],
        )
