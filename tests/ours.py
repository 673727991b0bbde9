"""Calls of the ops under test, with a kernel of one's choice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import scaledot
import torch
from cases import Case, Inputs
from torch import Tensor

KERNELS: tuple[str, ...] = tuple(scaledot._C.kernel_names())


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
    plan = torch.ops.scaledot.explain(
        **inputs.tensors(), **case.options(), return_weights=case.return_weights
    )
    result: dict[str, Any] = json.loads(plan)
    return result


def require(kernel: str, case: Case, inputs: Inputs, passes: tuple[str, ...]) -> None:
    """Inside forced(kernel): skips, with the kernel's own reason, unless it is what runs. A kernel must not
    refuse silently; test_sdpa_dispatch.py holds how much every kernel has to take."""
    plan = explain(case, inputs)
    for one_pass in passes:
        if plan[one_pass]["kernel"] != kernel:
            reasons = dict(plan[one_pass]["refused"])
            assert reasons.get(kernel), (
                f"{kernel} was forced and gave no reason, yet {plan[one_pass]['kernel']} runs"
            )
            pytest.skip(f"{kernel} refuses the {one_pass}: {reasons[kernel]}")
