"""The test library itself: its checks can fail, poison surrounds the data, and cases detect missing features."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from agreement import DTYPES, check_agreement
from case_list import BY_NAME, CASES, FEATURES
from cases import Case
from layouts import LAYOUTS, place
from oracle import eager_attention, solve
from scaledot.compare.numerics import ulp
from tolerances import check, limit


def test_ulp() -> None:
    assert ulp(torch.float32, 1.0) == 2.0**-23
    assert ulp(torch.float32, 1.99) == 2.0**-23
    assert ulp(torch.float32, 2.0) == 2.0**-22
    assert ulp(torch.bfloat16, 0.3) == 2.0**-9
    assert ulp(torch.float16, 1e-30) == 2.0**-24
    assert ulp(torch.float64, 0.0) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("gradient", [False, True])
def test_check_fails_just_above_its_limit(gradient: bool, dtype: torch.dtype) -> None:
    oracle = torch.linspace(-1.5, 1.0, 24, dtype=torch.float64).reshape(2, 3, 4)
    step = torch.finfo(dtype).eps
    eager_error = 5 * step
    factor = (3 if gradient else 2) + (1 if dtype == torch.float64 else 0)
    allowed = factor * eager_error + 2 * step
    assert limit(oracle, dtype, eager_error, gradient=gradient) == allowed
    for part, fine in ((0.97, True), (1.03, False)):
        ours = oracle.to(dtype)
        ours[1, 1, 3] = 0.5
        target = oracle.clone()
        target[1, 1, 3] = 0.5 + part * allowed
        if fine:
            check("x", ours.to(dtype), target, eager_error, gradient=gradient)
        else:
            with pytest.raises(AssertionError, match=r"x: error .* worst at \(1, 1, 3\)"):
                check("x", ours, target, eager_error, gradient=gradient)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_check_compares_where_numbers_are_finite(value: float) -> None:
    plain, odd = torch.ones(2, 3), torch.ones(2, 3)
    odd[1, 2] = value
    for ours, oracle in ((plain, odd), (odd, plain)):
        with pytest.raises(AssertionError, match=r"x: 1 of 6 elements .* at \(1, 2\)"):
            check("x", ours, oracle.double(), 1e9)
    check("x", odd, odd.double(), 0.0)


def test_check_compares_shapes() -> None:
    with pytest.raises(AssertionError, match=r"x: shape \(2, 3\)"):
        check("x", torch.ones(2, 3), torch.ones(1, 2, 3).double(), 1e9)


def test_terms_count_only_where_everything_cancels() -> None:
    zero, small = torch.zeros(3).double(), torch.full((3,), 1e-6).double()
    check("x", torch.full((3,), 2.0**-22), zero, 0.0, gradient=True, terms=1.5)
    with pytest.raises(AssertionError):
        check("x", torch.full((3,), 2.0**-21), zero, 0.0, gradient=True, terms=1.5)
    with pytest.raises(AssertionError):
        check("x", (small + 1e-7).float(), small, 0.0, gradient=True, terms=1.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", ["result 1", "gradient of small", "gradient of x"])
def test_agreement_holds_each_tensor_to_its_own_error(wrong: str, dtype: torch.dtype) -> None:
    """An error of some ten roundings fails, in a tensor that is a thousand times smaller than the others too."""

    def theirs(x: torch.Tensor, small: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.softmax(x * 0.5, -1), torch.tanh(x) * small * 1e-3

    def ours(x: torch.Tensor, small: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        off = 1 + 24 * torch.finfo(dtype).eps
        if wrong.startswith("gradient"):
            changed = x if wrong.endswith("x") else small
            changed.register_hook(lambda grad: grad * off)
            return theirs(x, small)
        first, second = theirs(x, small)
        return first, second * off

    inputs = {"x": torch.randn(5, 9), "small": torch.randn(5, 9)}
    check_agreement(theirs, theirs, inputs, dtype)
    with pytest.raises(AssertionError, match=f"^{wrong}: error"):
        check_agreement(ours, theirs, inputs, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (3, 4, 5), (4, 5), (2, 2, 3, 4, 5), (7,), (2, 0, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_placed_tensors_lie_in_poison(layout: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randn(shape) if dtype == torch.float32 else torch.rand(shape) < 0.8
    placed = place(values, layout)
    assert placed.shape == values.shape
    if not layout.startswith("expanded"):
        assert torch.equal(placed, values)
    buffer = torch.empty(0, dtype=dtype).set_(placed.untyped_storage())
    inside = torch.zeros(buffer.shape, dtype=torch.bool).as_strided(
        placed.shape, placed.stride(), placed.storage_offset()
    )
    everywhere = torch.empty(0, dtype=torch.bool).set_(inside.untyped_storage())
    inside.fill_(True)
    around = buffer[~everywhere]
    assert around.numel() >= 64 * 2
    assert not everywhere[:64].any()
    assert not everywhere[-64:].any()
    if dtype == torch.float32:
        assert torch.isnan(around).all()
    elif values.numel():
        assert (around == (not bool(placed.float().mean() > 0.5))).all()


def test_layouts_are_different() -> None:
    strides = {name: place(torch.randn(2, 3, 4, 5), name).stride() for name in LAYOUTS}
    assert strides["contiguous"] == strides["misaligned"]
    assert len(set(strides.values())) == len(LAYOUTS) - 1
    assert strides["inner2"][-1] == 2
    assert strides["transposed"][-2] == 1
    assert strides["blhd"][-2] > strides["blhd"][-3]
    for name, dim in (("batch", 0), ("heads", 1), ("rows", 2), ("cols", 3)):
        assert strides[f"expanded_{name}"][dim] == 0


def without(case: Case, options: dict[str, Any]) -> Case:
    """The case with these options at their defaults. It keeps its name, and so its random numbers."""
    fields: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Case)}
    return dataclasses.replace(case, **{option: fields[option] for option in options})


IMPLIED_BY_CAUSAL = {"window_right"}
LAYOUTS_OF_FEATURES = {"blhd", "inner2", "transposed", "expanded_batch", "expanded_heads"}
NOT_AN_OPTION_OF_THE_FORMULA = {*LAYOUTS_OF_FEATURES, "weights", "gqa", "mqa", "value_dim", "large"}


@pytest.mark.parametrize("name", [name for name in FEATURES if name not in NOT_AN_OPTION_OF_THE_FORMULA])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kernel_that_ignores_a_feature_fails_its_case(name: str, dtype: str) -> None:
    """Also together with any second feature: the result of such a kernel is outside the limits."""
    unnoticed = []
    for case in CASES:
        features = case.name.removesuffix("-" + case.dtype).split("+")
        if name not in features or case.dtype != dtype:
            continue
        if case.causal and name in IMPLIED_BY_CAUSAL:
            continue
        inputs, solution = case.make(), solve(case)
        ignorant = without(case, FEATURES[name])
        if "dropout_p" in FEATURES[name]:
            inputs.dropout_seed = None
        if "alibi" in FEATURES[name]:
            inputs.alibi_slopes = None
        if "relative" in FEATURES[name]:
            inputs.relative_bias = None
        if "blocks" in FEATURES[name]:
            inputs.blocks = inputs.block_bits = None
        if "masked_score" not in FEATURES[name] and "mask" in FEATURES[name]:
            inputs.attn_mask = None
        output, lse, _ = eager_attention(ignorant, inputs)
        try:
            check("output", output, solution.results["output"], solution.eager_error["output"])
            check("lse", lse.float(), solution.results["lse"], solution.eager_error["lse"])
        except AssertionError:
            continue
        unnoticed.append(case.name)
    assert not unnoticed


def test_the_names_say_what_the_cases_are() -> None:
    for case in CASES:
        assert case.name.endswith(case.dtype)
    for first in FEATURES:
        partners = {name for name in BY_NAME if name.startswith(f"{first}+") or f"+{first}-" in name}
        assert len(partners) > len(FEATURES) // 2, f"{first} is paired with {len(partners)} features only"
