"""Rows without keys, broadcast masks and their gradients, masks by position."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import eager
from cases import DTYPES, Case
from kernels_under_test import EVERY_KERNEL, assert_runs, sdpa, sized
from layouts import place
from oracle import keep_mask, solve

GQA: dict[str, Any] = dict(heads=4, kv_heads=2, enable_gqa=True)

# Each way to mask a whole row, with 70 queries and 33 keys: all rows, or the first 70 - 33.
EMPTY_ROWS: dict[str, dict[str, Any]] = {
    "bool": dict(mask="bool", mask_shape="QK"),
    "bool_rows": dict(mask="bool", mask_shape="Q1"),
    "padding": dict(mask="bool", mask_shape="111K"),
    "inf": dict(mask="inf", mask_shape="QK"),
    "inf_rows": dict(mask="inf", mask_shape="BHQ1"),
    "lower_right": dict(causal=True, causal_alignment="lower_right"),
    "window": dict(window=(3, None), causal=True, causal_alignment="lower_right"),
}


@EVERY_KERNEL
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", EMPTY_ROWS)
def test_rows_without_keys_give_zeros(way: str, dtype: str, kernel: str) -> None:
    """Output, weights and gradients are 0 and lse is -inf, for any incoming gradient."""
    case = Case(f"empty {way}", query_length=70, key_length=33, dtype=dtype, return_weights=True, **EMPTY_ROWS[way])
    case = sized(case, kernel, (7, 3))
    empty = case.query_length - case.key_length if case.mask == "none" else case.query_length
    inputs = case.make()
    if inputs.attn_mask is not None:
        inputs.attn_mask.fill_(False if case.mask == "bool" else -math.inf)
    inputs = inputs.requiring_grad()
    assert_runs(kernel, case, inputs)
    output, lse, weights = sdpa(case, inputs)
    for result in (output, weights) if case.return_weights else (output,):
        assert torch.equal(result[..., :empty, :], torch.zeros_like(result[..., :empty, :]))
        assert torch.isfinite(result).all()
    assert (lse[..., :empty] == -math.inf).all()
    assert torch.isfinite(lse[..., empty:]).all()
    gradients = eager.gradients((output, lse, weights), case.cotangents(), inputs.differentiable())
    of_empty_rows = gradients["query"][..., :empty, :]
    assert torch.equal(of_empty_rows, torch.zeros_like(of_empty_rows))
    for name, gradient in gradients.items():
        assert torch.isfinite(gradient).all(), name
        if empty == case.query_length:
            assert torch.equal(gradient, torch.zeros_like(gradient)), name
        else:
            assert gradient.abs().sum() > 0, name


@EVERY_KERNEL
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_masked_key_tiles_between_others_are_skipped(dropout_p: float, kernel: str) -> None:
    """Whole key tiles are masked, and the row maximum grows from tile to tile, so earlier sums must be rescaled."""
    case = Case("gaps", query_length=70, key_length=1300, mask="bool", dropout_p=dropout_p, **GQA)
    case = sized(case, kernel, (4, 1300))
    inputs = case.make()
    assert inputs.attn_mask is not None
    for masked in (slice(128, 256), slice(512, 640), slice(700, 703), slice(1100, None)):
        inputs.attn_mask[..., masked] = False
        inputs.value[..., masked, :] = math.nan
    inputs.key *= torch.linspace(0, 12, case.key_length).unsqueeze(-1)
    assert_runs(kernel, case, inputs)
    output, lse, _ = sdpa(case, inputs)
    exact = inputs.mapped(lambda t: t.nan_to_num().double() if t.is_floating_point() else t)
    wanted = eager.attention(case.with_(dtype="float64"), exact, keep_mask(case, inputs))
    torch.testing.assert_close(output.double(), wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), wanted[1], rtol=1e-6, atol=1e-6)
    maxima = [exact.key[..., :end, :].abs().amax() for end in (128, 512, 1100)]
    assert maxima[0] * 4 < maxima[1] < maxima[2], "the scores must grow"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", [-1e9, -3.0, 0.0, 5.0])
def test_finite_masked_score_makes_empty_rows_uniform(score: float, dtype: str, kernel: str) -> None:
    case = Case("uniform", mask="bool", mask_shape="11Q1", masked_score=score, dtype=dtype, return_weights=True)
    inputs = case.make()
    assert inputs.attn_mask is not None
    inputs.attn_mask.fill_(False)
    assert_runs(kernel, case, inputs)
    output, lse, weights = sdpa(case, inputs)
    uniform = torch.full_like(weights, 1 / case.key_length, dtype=torch.float64)
    mean = inputs.value.double().mean(-2, keepdim=True).expand(output.shape)
    eps = torch.finfo(case.torch_dtype).eps
    torch.testing.assert_close(weights.double(), uniform, rtol=4 * eps, atol=0)
    torch.testing.assert_close(output.double(), mean, rtol=0, atol=4 * eps)
    torch.testing.assert_close(
        lse.double(), torch.full_like(lse, score + math.log(53), dtype=torch.float64), rtol=1e-6, atol=1e-6
    )


@EVERY_KERNEL
@pytest.mark.parametrize("kind_of_mask", ["bool", "float", "inf"])
@pytest.mark.parametrize("shape", ["K", "Q1", "111K", "B11K", "H1K", "1HQ1"])
def test_a_broadcast_mask_is_the_expanded_mask(shape: str, kind_of_mask: str, kernel: str) -> None:
    case = Case(f"broadcast {shape}", mask=kind_of_mask, mask_shape=shape, query_length=67, key_length=130)
    case = sized(case, kernel, (6, 130))
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


@EVERY_KERNEL
@pytest.mark.parametrize("kind_of_mask", ["bool", "float"])
def test_a_mask_per_head_where_heads_share_a_row_tile(kind_of_mask: str, kernel: str) -> None:
    """All rows of a head have the same mask; rows of one tile may not."""
    case = Case("heads", mask=kind_of_mask, mask_shape="H1K", query_length=9, key_length=140, **GQA)
    case = sized(case, kernel, (4, 140))
    inputs = case.make().requiring_grad()
    dense = inputs.mapped(lambda t: t)
    assert inputs.attn_mask is not None
    dense.attn_mask = inputs.attn_mask.detach().expand(case.weights_shape).contiguous()
    names = {name: t for name, t in inputs.differentiable().items() if name != "attn_mask"}
    found, wanted = sdpa(case, inputs), sdpa(case, dense)
    assert torch.equal(found[0], wanted[0])
    gradients = [eager.gradients(results, case.cotangents(), names) for results in (found, wanted)]
    for name in names:
        assert torch.equal(gradients[0][name], gradients[1][name]), name


@EVERY_KERNEL
@pytest.mark.parametrize("causal", [False, True])
def test_every_nonzero_byte_of_a_bool_mask_is_true(causal: bool, kernel: str) -> None:
    """A boolean tensor that is a view of bytes can hold values other than 0 and 1."""
    case = Case("bytes", mask="bool", mask_shape="QK", query_length=140, key_length=140, causal=causal)
    case = sized(case, kernel, (6, 130))
    bytes_ = torch.randint(0, 4, (case.query_length, case.key_length), dtype=torch.uint8) * 85
    results = []
    for mask in (bytes_.view(torch.bool), bytes_ != 0):
        inputs = case.make()
        inputs.attn_mask = mask
        inputs = inputs.requiring_grad()
        found = sdpa(case, inputs)
        gradients = eager.gradients(found, case.cotangents(), inputs.differentiable()).values()
        results.append([found[0], found[1], *gradients])
    for ours, wanted in zip(*results, strict=True):
        assert torch.equal(ours, wanted)


def test_gradient_of_a_broadcast_mask_is_summed_to_its_shape(kernel: str) -> None:
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
            found.append(eager.gradients(sdpa(case, changed), case.cotangents(), {"attn_mask": mask})["attn_mask"])
        torch.testing.assert_close(
            found[0], found[1].sum_to_size(shape) if shape else found[1].sum(), rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize("alignment", ["upper_left", "lower_right"])
@pytest.mark.parametrize("sizes", [(1, 1), (7, 7), (3, 9), (9, 3), (1, 5), (64, 70)])
def test_sdpa_mask_follows_the_documented_formulas(sizes: tuple[int, int], alignment: str) -> None:
    """The double backward uses scaledot::sdpa_mask."""
    options: list[dict[str, Any]] = [
        {},
        dict(causal=True),
        dict(window=(0, 0)),
        dict(window=(2, None)),
        dict(window=(None, 1)),
        dict(window=(3, 2), causal=True),
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
    case = Case("single query", query_length=1, key_length=192, mask="float", mask_shape="B11K", return_weights=True)
    inputs, solution = case.make().requiring_grad(), solve(case)
    gradients = eager.gradients(sdpa(case, inputs), case.cotangents(), inputs.differentiable())
    for name, gradient in gradients.items():
        solution.check(name, gradient)
