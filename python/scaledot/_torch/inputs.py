"""The arguments of the ops by name: their tensors, and those of a call of sdpa_backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._load import OPS
from .schema import defaults, names, tensors_first

__all__ = [
    "DIFFERENTIABLE",
    "DIMS_LESS",
    "INPUTS",
    "QKV_GRADIENTS",
    "SHARED",
    "VARLEN_DIFFERENTIABLE",
    "VARLEN_INPUTS",
    "backward_arguments",
]


def _inputs(op: Any) -> tuple[str, ...]:
    return names(op)[: tensors_first(op)]


def _differentiable(backward: Any) -> tuple[str, ...]:
    """In the order of the backward's results, which are "grad_query" and so on."""
    return tuple(result.name.removeprefix("grad_") for result in backward._schema.returns)


INPUTS, DIFFERENTIABLE = _inputs(OPS.sdpa.default), _differentiable(OPS.sdpa_backward.default)
# The output_mask of sdpa_backward that asks for the gradients of query, key and value alone.
QKV_GRADIENTS = [name in ("query", "key", "value") for name in DIFFERENTIABLE]
VARLEN_INPUTS, VARLEN_DIFFERENTIABLE = _inputs(OPS.varlen.default), _differentiable(OPS.varlen_backward.default)
# Dimensions of query that these lack: (..., heads) and (..., heads, distances) in place of (..., heads, rows, columns).
DIMS_LESS = {"alibi_slopes": 2, "relative_bias": 1}
# A list of numbers, the same for the whole call.
SHARED = ("score_program", "score_numbers", "score_integers")


def backward_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of sdpa_backward: those of `given` that it takes, or else the defaults of sdpa, or else None."""
    known = {**defaults(OPS.sdpa.default), **given}
    return {name: known.get(name) for name in names(OPS.sdpa_backward.default)}
