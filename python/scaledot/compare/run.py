"""Runs a case: checks its results, then times the requested passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .check import Verdict, check
from .features import Case
from .machine import free_memory
from .timing import Effort, Timing, alternate
from .work import AttentionWork, Call, Tensors, Work, leaves_of


@dataclass(frozen=True)
class Pair:
    """The timings of one pass of one case."""

    ours: Timing
    peer: Timing | None  # None: the peer was not run

    @property
    def ratio(self) -> float | None:
        """The peer's time / our time; above 1, scaledot is faster."""
        return None if self.peer is None else self.peer.median / self.ours.median


@dataclass
class Row:
    case: Case
    peer: str
    kernels: dict[str, str]
    verdict: Verdict
    peer_skipped: str | None = None  # why the peer was not run, if it was not
    passes: dict[str, Pair] = field(default_factory=dict)


def make_work(case: Case, device: torch.device, peer: str) -> Work:
    if case.feature.module:
        from .module_work import ModuleWork

        return ModuleWork(case, device)
    if case.feature.cache:
        from .cache_work import CacheWork

        return CacheWork(case, device)
    if case.feature.score_mod:
        from .score_work import ScoreWork

        return ScoreWork(case, device)
    return AttentionWork(case, device, peer)


def _output(raw: Any) -> Tensor:
    output: Tensor = raw[0] if isinstance(raw, tuple) else raw
    return output


def _timed(make: Callable[[Tensors], Call], work: Work, which: str) -> Call:
    """The call to time, with everything prepared that does not belong to the pass."""
    leaves = leaves_of(work.inputs, which != "forward" or work.trains)
    call = make(leaves)
    if which == "forward":
        return call
    output = _output(call())
    grad, wanted = torch.randn_like(output), list(leaves.values())
    if which == "backward":
        return functools.partial(torch.autograd.grad, output, wanted, grad, retain_graph=True)
    return lambda: torch.autograd.grad(_output(call()), wanted, grad)


def run_case(
    case: Case, device: torch.device, passes: Iterable[str], effort: Effort, peer: str, step: Callable[[str], None]
) -> Row:
    """Checks the case and, if its results are right, times it. Calls `step` with the name of each part before it."""
    step("check")
    try:
        work = make_work(case, device, peer)
        row = Row(case, work.peer_label, work.kernels(), Verdict({}, 0.0))
    except Exception as error:  # scaledot refuses the arguments
        return Row(case, "", {}, Verdict({}, 0.0, f"{type(error).__name__}: {error}"))
    free, needed = free_memory(device), work.peer_bytes()
    if free is not None and needed > 0.6 * free:
        row.peer_skipped = f"needs about {needed / 2**30:.0f} GiB"
    row.verdict = check(work, with_peer=row.peer_skipped is None)
    if row.verdict.passed:
        for which in passes:
            if which != "forward" and not work.inputs:
                continue  # nothing gets a gradient
            step(which)
            sides = [_timed(work.ours, work, which)]
            if row.peer_skipped is None:
                sides.append(_timed(work.peer, work, which))
            timings = alternate(tuple(sides), effort)
            row.passes[which] = Pair(timings[0], timings[1] if len(timings) > 1 else None)
    return row
