"""Bad arguments of the ops themselves, which the public functions do not pass: seeds, patterns, the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import Case
from errors import ERRORS, assert_named

Arguments = dict[str, Any]


def good() -> Arguments:
    return {
        "query": torch.randn(2, 4, 6, 8),
        "key": torch.randn(2, 4, 7, 8),
        "value": torch.randn(2, 4, 7, 8),
    }


def zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(*shape, **options)


@pytest.mark.parametrize("name", ["unknown", "few", "many", "small"])
def test_bad_patterns(name: str) -> None:
    patterns: dict[str, tuple[Arguments, tuple[str, ...]]] = {
        "unknown": ({"pattern": "spiral"}, ("pattern", "spiral", "chunked", "prefix")),
        "few": ({"pattern": "chunked"}, ("pattern_args", "chunked")),
        "many": ({"pattern_args": [3]}, ("pattern_args", "none")),
        "small": ({"pattern": "chunked", "pattern_args": [0]}, ("pattern_args", "0", "1")),
    }
    options, needed = patterns[name]
    with pytest.raises(ERRORS) as raised:
        torch.ops.scaledot.sdpa(**good(), **options)
    assert_named(raised.value, needed)


SEEDS: dict[str, tuple[Callable[[], Tensor | None], tuple[str, ...]]] = {
    "missing": (lambda: None, ("dropout_seed", "None", "int64")),
    "int32": (lambda: zeros(2, dtype=torch.int32), ("dropout_seed", "int32", "int64")),
    "float": (lambda: zeros(2), ("dropout_seed", "float32", "int64")),
    "one number": (lambda: zeros(1, dtype=torch.int64), ("dropout_seed", "[1]", "(2,)")),
    "2-D": (lambda: zeros(2, 1, dtype=torch.int64), ("dropout_seed", "[2, 1]", "(2,)")),
    "of another batch": (lambda: zeros(3, 2, dtype=torch.int64), ("dropout_seed", "[3, 2]", "batch")),
    "of too many dimensions": (lambda: zeros(2, 2, 2, dtype=torch.int64), ("dropout_seed", "[2, 2, 2]", "batch")),
    "meta": (lambda: zeros(2, dtype=torch.int64, device="meta"), ("dropout_seed", "meta", "CPU")),
    "sparse": (lambda: torch.ones(2, dtype=torch.int64).to_sparse(), ("dropout_seed", "Sparse")),
}


@pytest.mark.parametrize("name", SEEDS)
def test_bad_seeds(name: str) -> None:
    seed, needed = SEEDS[name]
    with pytest.raises(ERRORS) as raised:
        torch.ops.scaledot.sdpa(**good(), dropout_p=0.5, dropout_seed=seed())
    assert_named(raised.value, needed)


def test_a_strided_seed_is_read_by_its_strides() -> None:
    case = Case("strided seed", dropout_p=0.5)
    inputs = case.make()
    wanted = torch.ops.scaledot.sdpa(**inputs.tensors(), dropout_p=0.5)[0]
    assert inputs.dropout_seed is not None
    spread = torch.full((6,), 77, dtype=torch.int64)
    spread[1::3] = inputs.dropout_seed
    inputs.dropout_seed = spread[1::3]
    assert torch.equal(torch.ops.scaledot.sdpa(**inputs.tensors(), dropout_p=0.5)[0], wanted)


def backward_arguments() -> Arguments:
    inputs = good()
    output, lse, weights = torch.ops.scaledot.sdpa(**inputs, return_weights=True)
    return {
        "grad_output": torch.randn_like(output), "grad_lse": torch.randn_like(lse), "grad_weights":
        torch.randn_like(weights),
        **inputs, "attn_mask": None, "alibi_slopes": None, "dropout_seed": None, "output": output, "lse": lse,
        "weights": weights,
        "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False, "causal_alignment":
        "upper_left",
        "window_left": None, "window_right": None, "softcap": None, "masked_score": None, "pattern": "none",
        "pattern_args": [],
        "part": None,
        "output_mask": [True, True, True, False],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["grad_output", "grad_lse", "grad_weights", "output", "lse", "weights"])
@pytest.mark.parametrize("what", ["shape", "dtype", "device", "sparse"])
def test_bad_backward_tensors(what: str, name: str) -> None:
    arguments = backward_arguments()
    torch.ops.scaledot.sdpa_backward(**arguments)
    tensor = arguments[name]
    arguments[name], needed = {
        "shape": (tensor[..., :-1], (name, str(list(tensor[..., :-1].shape)), str(list(tensor.shape)))),
        "dtype": (tensor.double(), (name, "float64", "float32")),
        "device": (tensor.to("meta"), (name, "meta", "cpu")),
        "sparse": (tensor.to_sparse(), (name, "Sparse")),
    }[what]
    with pytest.raises(ERRORS) as raised:
        torch.ops.scaledot.sdpa_backward(**arguments)
    assert_named(raised.value, needed)


def test_a_mask_gradient_without_a_float_mask() -> None:
    for mask in (None, torch.ones(6, 7, dtype=torch.bool)):
        with pytest.raises(ERRORS) as raised:
            torch.ops.scaledot.sdpa_backward(
                **{**backward_arguments(), "attn_mask": mask, "output_mask": [False] * 3 + [True]}
            )
        assert_named(raised.value, ("output_mask", "attn_mask"))


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": -1},
        {"heads": -2},
        {"query_length": -1},
        {"key_length": -5},
        {"dropout_p": 1.5},
        {"seed": zeros(2)},
    ],
)
def test_bad_dropout_mask_arguments(changes: Arguments) -> None:
    arguments: Arguments = {
        "seed": torch.tensor([1, 2]),
        "batch": 1,
        "heads": 2,
        "query_length": 3,
        "key_length": 4,
        "dropout_p": 0.5,
    }
    torch.ops.scaledot.dropout_mask(**arguments)
    with pytest.raises(ERRORS) as raised:
        torch.ops.scaledot.dropout_mask(**{**arguments, **changes})
    assert_named(raised.value, (next(iter(changes)).replace("seed", "dropout_seed"),))


@pytest.mark.parametrize(
    "changes",
    [
        {"window_left": -1},
        {"causal_alignment": "x"},
        {"alibi_slopes": torch.zeros(3)},
        {"key": torch.zeros(3)},
    ],
)
def test_bad_sdpa_mask_arguments(changes: Arguments) -> None:
    arguments = {key: good()[key] for key in ("query", "key")}
    torch.ops.scaledot.sdpa_mask(**arguments)
    with pytest.raises(ERRORS) as raised:
        torch.ops.scaledot.sdpa_mask(**{**arguments, **changes})
    assert_named(raised.value, (next(iter(changes)),))
