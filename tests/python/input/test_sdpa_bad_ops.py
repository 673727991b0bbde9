"""Bad arguments of the ops themselves, which the public functions do not pass: seeds, the backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, zeros

from bad_arguments import Arguments, refused, sdpa_arguments, shape_of
from cases import Case

SEEDS: dict[str, tuple[Callable[[], Tensor | None], tuple[str, ...]]] = {
    "missing": (lambda: None, ("dropout_seed", "None", "int64")),
    "int32": (lambda: zeros(2, dtype=torch.int32), ("dropout_seed", "int32", "int64")),
    "float": (lambda: zeros(2), ("dropout_seed", "float32", "int64")),
    "one number": (lambda: zeros(1, dtype=torch.int64), ("dropout_seed", "(1,)", "(2,)")),
    "2-D": (lambda: zeros(2, 1, dtype=torch.int64), ("dropout_seed", "(2, 1)", "(2,)")),
    "of another batch": (lambda: zeros(3, 2, dtype=torch.int64), ("dropout_seed", "(3, 2)", "batch")),
    "of too many dimensions": (lambda: zeros(2, 2, 2, dtype=torch.int64), ("dropout_seed", "(2, 2, 2)", "batch")),
    "meta": (lambda: zeros(2, dtype=torch.int64, device="meta"), ("dropout_seed", "meta", "CPU")),
    "sparse": (lambda: torch.ones(2, dtype=torch.int64).to_sparse(), ("dropout_seed", "Sparse")),
}


@pytest.mark.parametrize("name", SEEDS)
def test_bad_seeds(name: str) -> None:
    seed, needed = SEEDS[name]
    with refused(*needed):
        torch.ops.scaledot.sdpa(**sdpa_arguments(), dropout_p=0.5, dropout_seed=seed())


def test_a_seed_need_not_be_contiguous() -> None:
    case = Case("strided seed", dropout_p=0.5)
    inputs = case.make()
    wanted = torch.ops.scaledot.sdpa(**inputs.tensors(), dropout_p=0.5)[0]
    assert inputs.dropout_seed is not None
    spread = torch.full((6,), 77, dtype=torch.int64)
    spread[1::3] = inputs.dropout_seed
    inputs.dropout_seed = spread[1::3]
    assert torch.equal(torch.ops.scaledot.sdpa(**inputs.tensors(), dropout_p=0.5)[0], wanted)


def backward_arguments() -> Arguments:
    """A call of sdpa_backward that works."""
    inputs = sdpa_arguments()
    output, lse, weights = torch.ops.scaledot.sdpa(**inputs, return_weights=True)
    return {
        **{f"grad_{name}": torch.randn_like(t) for name, t in (("output", output), ("lse", lse), ("weights", weights))},
        **inputs,
        **dict.fromkeys(("attn_mask", "alibi_slopes", "dropout_seed", "relative_bias", "blocks", "block_bits")),
        **dict.fromkeys(("score_program", "score_numbers", "score_integers", "key_indices")),
        "output": output,
        "lse": lse,
        "weights": weights,
        "saved": None,
        "saved_keys": None,
        **Case("options").options(),
        "part": None,
        "output_mask": [True, True, True, False, False, False],
    }


@pytest.mark.parametrize("name", ["grad_output", "grad_lse", "grad_weights", "output", "lse", "weights"])
@pytest.mark.parametrize("what", ["shape", "dtype", "device", "sparse"])
def test_bad_backward_tensors(what: str, name: str) -> None:
    arguments = backward_arguments()
    torch.ops.scaledot.sdpa_backward(**arguments)
    tensor = arguments[name]
    arguments[name], needed = {
        "shape": (tensor[..., :-1], (name, shape_of(tensor[..., :-1]), shape_of(tensor))),
        "dtype": (tensor.double(), (name, "float64", "float32")),
        "device": (tensor.to("meta"), (name, "meta", "cpu")),
        "sparse": (tensor.to_sparse(), (name, "Sparse")),
    }[what]
    with refused(*needed):
        torch.ops.scaledot.sdpa_backward(**arguments)


def test_a_mask_gradient_needs_a_float_mask() -> None:
    for mask in (None, torch.ones(6, 7, dtype=torch.bool)):
        with refused("output_mask", "attn_mask"):
            torch.ops.scaledot.sdpa_backward(
                **{**backward_arguments(), "attn_mask": mask, "output_mask": [False] * 3 + [True, False, False]}
            )


def test_a_gradient_of_relative_bias_needs_one() -> None:
    with refused("output_mask", "relative_bias"):
        torch.ops.scaledot.sdpa_backward(**{**backward_arguments(), "output_mask": [False] * 4 + [True, False]})


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
    with refused(next(iter(changes)).replace("seed", "dropout_seed")):
        torch.ops.scaledot.dropout_mask(**{**arguments, **changes})


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
    arguments = {key: sdpa_arguments()[key] for key in ("query", "key")}
    torch.ops.scaledot.sdpa_mask(**arguments)
    with refused(next(iter(changes)).replace("window_left", "window")):
        torch.ops.scaledot.sdpa_mask(**{**arguments, **changes})
