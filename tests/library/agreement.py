"""Compares a drop-in with the code it replaces by the numerics rule: results and all gradients."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tolerances import check, error, largest

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
Tensors = dict[str, Tensor]


class OpCounter(TorchDispatchMode):
    """Counts the ops that run while it is active: `count["scaledot.sdpa"]`."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def zeros_for_empty_rows() -> Iterator[None]:
    """Makes the softmax of reference code give zeros for rows of -inf, as the drop-ins do."""
    softmax = torch.softmax

    def safe(scores: Tensor, dim: int) -> Tensor:
        empty = torch.isneginf(scores).all(dim, keepdim=True)
        return softmax(scores.masked_fill(empty, 0), dim).masked_fill(empty, 0)

    with mock.patch.object(torch, "softmax", safe), mock.patch.object(F, "softmax", safe):
        yield


def parameter_names(function: Callable[..., Any]) -> list[tuple[str, object]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


def results_of(returned: Any) -> list[Tensor]:
    if dataclasses.is_dataclass(returned):
        returned = tuple(vars(returned).values())
    return [r for r in (returned if isinstance(returned, tuple) else (returned,)) if r is not None]


def solve(
    attention: Callable[..., Any], inputs: dict[str, Any], dtype: torch.dtype, seed: int = 1
) -> tuple[Tensors, Tensors]:
    """Results and gradients, also of a module's parameters, for cotangents drawn from `seed`.

    Floating inputs are converted to `dtype`. A tensor given as several inputs stays one tensor.
    """
    leaves: dict[int, Tensor] = {}

    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return leaves.setdefault(id(x), x.detach().to(dtype, copy=True).requires_grad_())

    arguments = {name: leaf(x) for name, x in inputs.items()}
    wanted = {name: x for name, x in arguments.items() if isinstance(x, Tensor) and x.requires_grad}
    if isinstance(attention, nn.Module):
        wanted |= dict(attention.named_parameters())
    results = results_of(attention(**arguments))
    generator = torch.Generator().manual_seed(seed)
    cotangents = [
        torch.randn(r.shape, generator=generator, dtype=torch.float64).bfloat16().to(r.dtype) for r in results
    ]
    gradients = torch.autograd.grad(results, list(wanted.values()), cotangents, allow_unused=True)
    found = {name: g for name, g in zip(wanted, gradients, strict=True) if g is not None}
    return {f"result {i}": r.detach() for i, r in enumerate(results)}, found


def as_dtype(attention: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """A module with parameters of this dtype; other functions as they are."""
    if not isinstance(attention, nn.Module) or all(t.dtype == dtype for t in attention.state_dict().values()):
        return attention
    return copy.deepcopy(attention).to(dtype)


def redrawn(inputs: dict[str, Any], dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Inputs of the same distribution, rounded to `dtype`, in float64. Seed 0 keeps the given values.

    Integers and masks (tensors with infinite or equal elements) keep their values. A tensor given twice stays one
    tensor.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[int, Tensor] = {}

    def draw(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        if id(x) not in drawn:
            wide = x.detach().double()
            if seed and wide.numel() > 1 and 0 < float(wide.std()) < math.inf:
                noise = torch.randn(wide.shape, generator=generator, dtype=torch.float64)
                wide = wide.mean() + wide.std() * noise
            drawn[id(x)] = wide.to(dtype).double()
        return drawn[id(x)]

    return {name: draw(x) for name, x in inputs.items()}


def draws_for(tensors: Tensors) -> int:
    """The number of draws over which eager's error is measured: with 14, one call of 8,305 was 12% over its limit."""
    fewest = min(t.numel() for t in tensors.values())
    return min(max(20, 1000 // max(fewest, 1)), 40)


def check_agreement(
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    inputs: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    draws: int | None = None,
    terms: float = 0.0,
    cancels: Callable[[], bool] = lambda: False,
    of_gradients: bool = False,
) -> None:
    """Calls both with `inputs` by name. Modules must have the same parameters, which are converted to `dtype`.

    `draws`: how often eager's error is measured. `terms` and `cancels`: for the gradients, as in tolerances.py.
    `of_gradients`: the results are gradients as well.

    Each draw of eager's error, and `cancels`, can only raise a limit. So what passes without them needs none.
    """
    # The oracle computes in float64, but from parameters rounded to dtype.
    oracle = as_dtype(as_dtype(theirs, dtype), torch.float64)
    # For float64, the error of float32 is scaled (see tolerances.py).
    eager_dtype = torch.float32 if dtype == torch.float64 else dtype
    ratio = torch.finfo(dtype).eps / torch.finfo(eager_dtype).eps
    given = redrawn(inputs, dtype, 0)
    exact, exact_grads = solve(oracle, given, torch.float64)
    found, found_grads = solve(as_dtype(ours, dtype), given, dtype)
    assert list(found) == list(exact)
    assert set(found_grads) == set(exact_grads), "gradients reach other tensors"
    assert {result.dtype for result in found.values()} == {dtype}
    terms = max(terms, *(largest(g) for g in exact_grads.values()))

    def eager_errors(seed: int) -> dict[str, tuple[float, float]]:
        """Eager's largest errors in one draw, absolute and relative to the result's scale."""
        problem = redrawn(inputs, dtype, seed) if seed else given
        right = solve(oracle, problem, torch.float64, seed + 1) if seed else (exact, exact_grads)
        rounded = solve(as_dtype(theirs, eager_dtype), problem, eager_dtype, seed + 1)
        errors = {}
        for wanted, other in zip(right, rounded, strict=True):
            for name, tensor in wanted.items():
                largest_error = ratio * error(other[name], tensor)
                errors[name] = largest_error, largest_error / (largest(tensor) or 1.0)
        return errors

    def compare(errors_of_draws: list[dict[str, tuple[float, float]]], cancels: bool) -> None:
        for kind, mine, right in (("", found, exact), ("gradient of ", found_grads, exact_grads)):
            for name, tensor in right.items():
                absolute, relative = (max([0.0, *(errors[name][k] for errors in errors_of_draws)]) for k in (0, 1))
                eager_error = max(absolute, relative * largest(tensor))
                gradient = bool(kind) or of_gradients
                rule: dict[str, Any] = {"terms": terms, "cancels": cancels} if gradient else {}
                check(kind + name, mine[name], tensor, eager_error, gradient=gradient, **rule)

    draws = draws or draws_for(exact | exact_grads)
    errors_of_draws: list[dict[str, tuple[float, float]]] = []
    for count in (0, 1):
        with contextlib.suppress(AssertionError):
            errors_of_draws += [eager_errors(seed) for seed in range(count)]
            return compare(errors_of_draws, False)
    errors_of_draws += [eager_errors(seed) for seed in range(1, draws)]
    compare(errors_of_draws, cancels())
