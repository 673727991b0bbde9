"""The kernels of the table and which cases they take; calls of the ops with a chosen kernel."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import scaledot
from cases import Case, Inputs

KERNELS: tuple[str, ...] = tuple(scaledot._load.kernel_names())
BOTH = ("forward", "backward")


@contextmanager
def forced(kernel: str | None) -> Iterator[None]:
    """Makes this kernel the first choice; None keeps the order of the table."""
    scaledot._load.force_kernel(kernel)
    try:
        yield
    finally:
        scaledot._load.force_kernel(None)


def sdpa(case: Case, inputs: Inputs, *, return_weights: bool | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(output, lse, weights) of torch.ops.scaledot.sdpa; weights has shape (0,) if not requested."""
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


@functools.cache
def chosen_kernels(case: Case) -> dict[str, dict[str, str]]:
    """For each kernel that is forced, the kernel that then runs each pass of the case."""
    inputs, chosen = case.make().requiring_grad(), {}
    for kernel in KERNELS:
        with forced(kernel):
            plan = explain(case, inputs)
        chosen[kernel] = {one_pass: str(plan[one_pass]["kernel"]) for one_pass in BOTH}
    return chosen


def takes(kernel: str, case: Case, passes: tuple[str, ...]) -> bool:
    """Whether the kernel runs these passes of the case when it is forced. A kernel may refuse a case."""
    return all(chosen_kernels(case)[kernel][one_pass] == kernel for one_pass in passes)


def assert_runs(kernel: str, case: Case, inputs: Inputs) -> None:
    """Inside forced(kernel): asserts that the kernel runs both passes of the case."""
    plan = explain(case, inputs)
    assert plan["forward"]["kernel"] == kernel
    assert plan["backward"]["kernel"] == kernel


def pairs(cases: Iterable[Case], passes: tuple[str, ...]) -> list[Any]:
    """Parameters ("case", "kernel"): each case with each kernel that takes it. test_sdpa_dispatch.py tests which cases
    a kernel must take."""
    return [
        pytest.param(case, kernel, id=f"{case.name}-{kernel}")
        for case in cases
        for kernel in KERNELS
        if takes(kernel, case, passes)
    ]


# The kernels of this machine: for any shape and dtype, for any shape in bfloat16, and for few query rows (decoding).
GENERAL = tuple(kernel for kernel in KERNELS if takes(kernel, Case("any shape"), BOTH))
BFLOAT16_ONLY = tuple(
    kernel
    for kernel in KERNELS
    if kernel not in GENERAL and takes(kernel, Case("any shape", dtype="bfloat16"), BOTH)
)
FEW_ROWS = tuple(
    kernel
    for kernel in KERNELS
    if kernel not in GENERAL and takes(kernel, Case("few rows", query_length=4), BOTH)
)

EVERY_KERNEL = pytest.mark.parametrize("kernel", GENERAL + BFLOAT16_ONLY + FEW_ROWS, indirect=True)


def sized(case: Case, kernel: str, few: tuple[int, int]) -> Case:
    """The case; for a kernel for few query rows, the case with `few` as (query_length, key_length)."""
    if kernel not in FEW_ROWS:
        return case
    return case.with_(query_length=few[0], key_length=few[1], return_weights=False)
