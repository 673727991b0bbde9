"""What a case's results and gradients should be (scaledot.reference in float64), and how far eager PyTorch is
from it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import eager
import torch
from cases import Case, Cotangents, Inputs
from scaledot import reference
from tolerances import error, largest
from torch import Tensor

RESULTS = ("output", "lse", "weights")
Attention = Callable[[Case, Inputs], tuple[Tensor, Tensor, Tensor]]


@dataclass
class Solution:
    results: dict[str, Tensor]
    gradients: dict[str, Tensor]
    eager_error: dict[str, float]  # by the names of both
    terms: dict[str, float]  # gradients: the magnitude of what may cancel


def keep_mask(case: Case, inputs: Inputs) -> Tensor | None:
    """The weights that dropout keeps, by scaledot.reference's own Philox: bool, of the weights' shape."""
    if inputs.dropout_seed is None:
        return None
    heads = 1 if case.heads is None else case.heads
    keep = reference.philox_keep_mask(
        inputs.dropout_seed, math.prod(case.batch), heads, case.query_length, case.key_length, case.dropout_p
    )
    return keep.reshape(case.weights_shape)


def reference_attention(case: Case, inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    arguments = case.functional_arguments()
    del arguments["return_weights"]
    return reference.attention(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.attn_mask,
        alibi_slopes=inputs.alibi_slopes,
        dropout_mask=keep_mask(case, inputs),
        pattern=case.pattern,
        pattern_args=case.pattern_args,
        **arguments,
        **options,
    )


def _wide(inputs: Inputs) -> Inputs:
    return inputs.mapped(lambda t: t.double() if t.is_floating_point() else t).requiring_grad()


def _solve(
    attention: Attention, case: Case, inputs: Inputs, cotangents: Cotangents
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    results = attention(case, inputs)
    grads = eager.gradients(results, cotangents, inputs.differentiable())
    return {name: r.detach() for name, r in zip(RESULTS, results, strict=True)}, grads


def eager_attention(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    return eager.attention(case, inputs, keep_mask(case, inputs))


def _eager_errors(
    case: Case, inputs: Inputs, cotangents: Cotangents, exact: dict[str, Tensor]
) -> dict[str, float]:
    """Eager's error in the case's dtype. Against `exact`, or for float64 see tolerances.py."""
    ratio = 1.0
    if case.dtype == "float64":
        ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        inputs = inputs.mapped(lambda t: t.float() if t.is_floating_point() else t)
        cotangents = Cotangents(*(None if t is None else t.float() for t in vars(cotangents).values()))
        wide = _solve(eager_attention, case, _wide(inputs), cotangents)
        exact = wide[0] | wide[1]
    results, grads = _solve(eager_attention, case, inputs.requiring_grad(), cotangents)
    return {name: ratio * error(tensor, exact[name]) for name, tensor in (results | grads).items()}


def _terms(case: Case, inputs: Inputs, cotangents: Cotangents) -> dict[str, float]:
    sizes = {
        name: 0.0 if t is None else largest(t) for name, t in (vars(cotangents) | inputs.tensors()).items()
    }
    weight = (
        sizes["output"] * sizes["value"] * math.sqrt(inputs.value.size(-1)) + sizes["weights"] + sizes["lse"]
    )
    weight /= 1 - case.dropout_p
    scale = abs(case.scale) if case.scale is not None else 1 / math.sqrt(max(case.head_dim, 1))
    return {
        "query": weight * scale * sizes["key"],
        "key": weight * scale * sizes["query"],
        "value": 0.0,
        "attn_mask": weight,
    }


@functools.cache
def solve(case: Case, seed: int = 0) -> Solution:
    inputs, cotangents = case.make(seed), case.cotangents(seed)
    results, grads = _solve(reference_attention, case, _wide(inputs), cotangents)
    errors = _eager_errors(case, inputs, cotangents, results | grads)
    return Solution(results, grads, errors, _terms(case, inputs, cotangents))
