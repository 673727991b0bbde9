"""The expected results and gradients of a case (reference.py in float64), and the errors of eager PyTorch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import eager
import reference
from cases import Case, Cotangents, Inputs
from scaledot import BlockMask
from tolerances import check, error, largest

RESULTS = ("output", "lse", "weights")
Attention = Callable[[Case, Inputs], tuple[Tensor, Tensor, Tensor]]


@dataclass
class Solution:
    results: dict[str, Tensor]
    gradients: dict[str, Tensor]
    eager_error: dict[str, float]  # of results and gradients
    terms: dict[str, float]  # of gradients: the magnitude of the terms that may cancel
    one_key: bool  # no row has two live keys, so every softmax is 1 and its gradient cancels

    def check(self, name: str, ours: Tensor) -> None:
        """Checks one result, or the gradient of one input, by the numerics rule."""
        gradient = name not in RESULTS
        exact = (self.gradients if gradient else self.results)[name]
        terms = self.terms[name] if gradient else 0.0
        what = f"gradient of {name}" if gradient else name
        eager_error = self.eager_error[name]
        check(what, ours, exact, eager_error, gradient=gradient, terms=terms, cancels=self.one_key)

    def check_results(self, results: tuple[Tensor, Tensor, Tensor], return_weights: bool) -> None:
        """Checks (output, lse[, weights]) by the rule."""
        for name, ours in zip(RESULTS if return_weights else RESULTS[:2], results, strict=False):
            self.check(name, ours)


def keep_mask(case: Case, inputs: Inputs) -> Tensor | None:
    """The weights that dropout keeps, by the Philox of reference.py: bool, with the shape of the weights."""
    if inputs.dropout_seed is None:
        return None
    heads = 1 if case.heads is None else case.heads
    keep = reference.philox_keep_mask(
        inputs.dropout_seed, math.prod(case.batch), heads, case.query_length, case.key_length, case.dropout_p
    )
    return keep.reshape(case.weights_shape)


def block_mask(case: Case, inputs: Inputs) -> BlockMask | None:
    if inputs.blocks is None or inputs.block_bits is None:
        return None
    return BlockMask(inputs.blocks, inputs.block_bits, case.block_size, (case.query_length, case.key_length))


def reference_attention(case: Case, inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    arguments = case.functional_arguments()
    del arguments["return_weights"]
    return reference.attention(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.attn_mask,
        alibi_slopes=inputs.alibi_slopes,
        relative_bias=inputs.relative_bias,
        dropout_mask=keep_mask(case, inputs),
        block_mask=block_mask(case, inputs),
        **arguments,
        **options,
    )


def of_last_columns(case: Case, gradient: Tensor) -> Tensor:
    """The gradient of attn_mask: 0 for the keys that a packed call has no column for."""
    before = case.key_length - (case.key_length if case.mask_columns is None else case.mask_columns)
    return gradient.index_fill(-1, torch.arange(max(before, 0)), 0)


def _wide(inputs: Inputs) -> Inputs:
    return inputs.mapped(lambda t: t.double() if t.is_floating_point() else t).requiring_grad()


def _solve(
    attention: Attention, case: Case, inputs: Inputs, cotangents: Cotangents, gradients: bool = True
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with torch.set_grad_enabled(gradients):
        results = attention(case, inputs)
    grads = eager.gradients(results, cotangents, inputs.differentiable()) if gradients else {}
    if case.mask_columns is not None and "attn_mask" in grads:
        grads["attn_mask"] = of_last_columns(case, grads["attn_mask"])
    return {name: r.detach() for name, r in zip(RESULTS, results, strict=True)}, grads


def eager_attention(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    return eager.attention(case, inputs, keep_mask(case, inputs))


def _eager_errors(case: Case, seed: int, gradients: bool) -> dict[str, tuple[float, float]]:
    """Eager's largest error in one draw of the case, absolute and relative to the result's scale.

    The exact values are those of eager itself in float64, which test_sdpa_forward.py compares with the oracle. For
    float64 see tolerances.py.
    """
    inputs, cotangents, ratio = case.make(seed), case.cotangents(seed), 1.0
    if case.dtype == "float64":
        ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        inputs = inputs.mapped(lambda t: t.float() if t.is_floating_point() else t)
        cotangents = Cotangents(*(None if t is None else t.float() for t in vars(cotangents).values()))
    exact = _solve(eager_attention, case, _wide(inputs), cotangents, gradients)
    rounded = _solve(eager_attention, case, inputs.requiring_grad(), cotangents, gradients)
    errors = {}
    for (name, wanted), found in zip((exact[0] | exact[1]).items(), (rounded[0] | rounded[1]).values(), strict=True):
        largest_error = ratio * error(found, wanted)
        errors[name] = largest_error, largest_error / (largest(wanted) or 1.0)
    return errors


def _draws(exact: dict[str, Tensor]) -> int:
    """The number of draws over which eager's error is measured: more if one draw has few elements.

    A result often has few (lse: the rows) where gradients have many. Draws for results alone have no backward.
    """
    fewest = min((tensor.numel() for tensor in exact.values()), default=1000)
    return min(max(5, 1000 // max(fewest, 1)), 40)


def _one_key(case: Case, inputs: Inputs) -> bool:
    """Whether no row has two live keys."""
    inputs = inputs.mapped(lambda t: t)
    inputs.dropout_seed = None
    weights = reference_attention(case.with_(dropout_p=0.0), inputs)[2]
    return bool(((weights != 0).sum(-1) <= 1).all())


def _terms(case: Case, inputs: Inputs, cotangents: Cotangents) -> dict[str, float]:
    """Bounds of the terms of dS = P * (dP - rowsum(P * dP) + dlse), times the factors of dS in each gradient."""
    sizes = {name: 0.0 if t is None else largest(t) for name, t in (vars(cotangents) | inputs.tensors()).items()}
    slope = sizes["weights"] + sizes["lse"]
    if cotangents.output is not None:
        value = inputs.value if case.heads is None else eager.with_heads(case, inputs.value, case.heads)
        slope += largest(cotangents.output.double().abs() @ value.double().abs().mT)
    slope /= 1 - case.dropout_p
    scale = abs(case.scale) if case.scale is not None else 1 / math.sqrt(max(case.head_dim, 1))
    return {
        "query": slope * scale * sizes["key"],
        "key": slope * scale * sizes["query"],
        "value": 0.0,
        "attn_mask": slope,
        "relative_bias": slope,
    }


@functools.cache
def solve(case: Case, seed: int = 0) -> Solution:
    inputs, cotangents = case.make(seed), case.cotangents(seed)
    results, grads = _solve(reference_attention, case, _wide(inputs), cotangents)
    draws, draws_with_gradients = _draws(results | grads), _draws(grads)
    errors = [_eager_errors(case, seed + draw * 1000, draw < draws_with_gradients) for draw in range(draws)]
    eager_error = {}
    for name, exact in (results | grads).items():
        of_name = [draw[name] for draw in errors if name in draw]
        absolute, relative = (max(error[k] for error in of_name) for k in (0, 1))
        eager_error[name] = max(absolute, relative * largest(exact))
    return Solution(results, grads, eager_error, _terms(case, inputs, cotangents), _one_key(case, inputs))
