"""Correctness: the numerics rule (`numerics`), applied to a case before it is timed.

The oracle is eager torch in float64. A result has to be non-finite exactly where the oracle is.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from .numerics import largest, limit
from .work import Tensors, Work, leaves_of


@dataclass(frozen=True)
class Finding:
    """The check of one result or gradient. Errors are maxima of |error|; `scale` is the oracle's largest magnitude."""

    gradient: bool
    ours: float
    peer: float
    eager: float
    allowed: float
    scale: float
    problem: str | None  # None: within the rule


@dataclass(frozen=True)
class Verdict:
    findings: dict[str, Finding]  # by the name of the result, or of the input whose gradient it is
    share: float  # the fraction of the output's rows that was checked
    problem: str | None = None  # the exception, if the call raised one

    @property
    def passed(self) -> bool:
        return self.problem is None and not any(f.problem for f in self.findings.values())

    def problems(self) -> list[str]:
        if self.problem is not None:
            return [self.problem]
        return [f"{name}: {f.problem}" for name, f in self.findings.items() if f.problem]

    def worst(self, gradient: bool) -> Finding | None:
        """The finding with the largest ratio of error to limit."""
        found = [f for f in self.findings.values() if f.gradient == gradient]
        return max(found, key=lambda f: (f.problem is not None, f.ours / f.allowed if f.allowed else 0.0), default=None)


def judge(
    ours: Tensor,
    peer: Tensor | None,
    eager: Tensor,
    oracle: Tensor,
    dtype: torch.dtype,
    *,
    gradient: bool,
    eager_share: float = 0.0,
) -> Finding:
    """Applies the rule to one tensor. For float64, `eager` is the float32 result.

    `eager_share`: eager's largest error for other inputs, as a share of the largest element. A result of few elements
    may have no error by chance.
    """

    def error(tensor: Tensor) -> float:
        return largest(tensor.double() - oracle)

    # A float64 oracle cannot measure eager's float64 error. Errors are proportional to the unit roundoff, so scale the
    # float32 error down.
    narrowed = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps if dtype == torch.float64 else 1.0
    scale = largest(oracle)
    eager_error = max(error(eager) * narrowed, eager_share * scale)
    # A gradient that is exactly 0, such as that of a softmax over one key, is a difference of terms of size 1. Its
    # rounding error is theirs.
    allowed = limit(eager_error, scale if scale > 1e-12 else 1.0, dtype, gradient=gradient)
    found, problem = math.nan, None
    if ours.shape != oracle.shape:
        problem = f"got shape {tuple(ours.shape)}; needs {tuple(oracle.shape)}"
    elif bool((torch.isfinite(ours) != torch.isfinite(oracle)).any()):
        wrong = int((torch.isfinite(ours) != torch.isfinite(oracle)).sum())
        found, problem = (
            error(ours),
            f"{wrong} of {ours.numel()} elements are finite where the oracle is not, or the reverse",
        )
    else:
        found = error(ours)
        if not found <= allowed:
            problem = f"error {found:.2e} is above the limit {allowed:.2e} (eager's error is {eager_error:.2e})"
    return Finding(gradient, found, math.nan if peer is None else error(peer), eager_error, allowed, scale, problem)


def _run(work: Work, side: int) -> tuple[Tensors, Tensors]:
    """The sampled (results, gradients) of our call (side 0) or of the peer's (side 1)."""
    leaves = leaves_of(work.inputs, True)
    call = work.checked_calls(leaves)[side]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Dropout mask should only be used for testing")
        raw = call()
    results = dict(zip(("output", "weights"), raw if isinstance(raw, tuple) else (raw,), strict=False))
    wanted = list(leaves.values())
    grads = torch.autograd.grad(results["output"], wanted, work.cotangent()) if wanted else ()
    sampled = {name: work.take(name, tensor.detach()) for name, tensor in results.items()}
    return sampled, {name: work.take(name, grad) for name, grad in zip(leaves, grads, strict=True)}


def check(work: Work, with_peer: bool = True) -> Verdict:
    """Checks our results and gradients against the oracle, and measures the peer's and eager torch's errors.

    An exception of our call becomes the verdict's problem; any other exception is raised. Without the peer, its errors
    are NaN.
    """
    try:
        results, grads = _run(work, 0)
    except Exception as error:
        return Verdict({}, work.sample.share, f"{type(error).__name__}: {error}")
    dtype = work.case.dtype
    peer = _run(work, 1) if with_peer else None
    eager = work.solve(torch.float32 if dtype == torch.float64 else dtype)
    oracle = work.solve(torch.float64)
    findings = {}
    for kind, ours in enumerate((results, grads)):
        for name, exact in oracle[kind].items():
            other = peer[kind][name] if peer else None
            findings[name] = judge(ours[name], other, eager[kind][name], exact, dtype, gradient=kind == 1)
    return Verdict(findings, work.sample.share)
