"""Calls of the ops under test, with a kernel of one's choice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import scaledot
from cases import Case, Inputs

KERNELS: tuple[str, ...] = tuple(scaledot._C.kernel_names())
BOTH = ("forward", "backward")


@contextmanager
def forced(kernel: str | None) -> Iterator[None]:
    """Makes this kernel the first choice; None leaves the table's own order."""
    scaledot._C.force_kernel(kernel)
    try:
        yield
    finally:
        scaledot._C.force_kernel(None)


def sdpa(case: Case, inputs: Inputs, *, return_weights: bool | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(output, lse, weights) of torch.ops.scaledot.sdpa; weights has shape (0,) unless asked for."""
    if return_weights is None:
        return_weights = case.return_weights
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.scaledot.sdpa(
        **inputs.tensors(), **case.options(), return_weights=return_weights
    )
    return result


def explain(case: Case, inputs: Inputs) -> dict[str, Any]:
    plan = torch.ops.scaledot.explain(**inputs.tensors(), **case.options(), return_weights=case.return_weights)
    result: dict[str, Any] = json.loads(plan)
    return result


def takes(kernel: str, case: Case, passes: tuple[str, ...]) -> bool:
    """Whether this kernel runs these passes of the case when it is forced: it refuses what it cannot do."""
    inputs = case.make().requiring_grad()
    with forced(kernel):
        plan = explain(case, inputs)
    return all(plan[one_pass]["kernel"] == kernel for one_pass in passes)


def assert_runs(kernel: str, case: Case, inputs: Inputs) -> None:
    """Inside forced(kernel): what is tested is that kernel, in both passes if it has both."""
    plan = explain(case, inputs)
    assert plan["forward"]["kernel"] == kernel
    assert kernel in FEW_ROWS or plan["backward"]["kernel"] == kernel


def pairs(cases: Iterable[Case], passes: tuple[str, ...]) -> list[Any]:
    """Parameters ("case", "kernel"): every case with every kernel of the table that takes it. What a kernel
    may refuse is held by test_sdpa_dispatch.py."""
    return [
        pytest.param(case, kernel, id=f"{case.name}-{kernel}")
        for case in cases
        for kernel in KERNELS
        if takes(kernel, case, passes)
    ]


# The kernels for any shape, on this machine; those that take any shape of one dtype; and those for few query rows,
# which have a forward only.
GENERAL = tuple(kernel for kernel in KERNELS if takes(kernel, Case("any shape"), BOTH))
BFLOAT16_ONLY = tuple(
    kernel
    for kernel in KERNELS
    if kernel not in GENERAL and takes(kernel, Case("any shape", dtype="bfloat16"), BOTH)
)
FEW_ROWS = tuple(
    kernel
    for kernel in KERNELS
    if kernel not in GENERAL and takes(kernel, Case("few rows", query_length=4), ("forward",))
)
