"""Checks a model, then times its passes with scaledot, with sdpa and with eager attention in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..check import Verdict
from ..run import Pair
from ..timing import Effort, Timing, alternate_parts
from .catalogue import MODELS, PEERS, SIDES, STEP, Model
from .check import check
from .subject import Subject

Sides = dict[str, Timing]


@dataclass
class ModelRow:
    name: str
    dtype_name: str
    shape: str
    amount: int  # tokens or samples in a call
    verdict: Verdict
    timings: dict[str, Sides] = field(default_factory=dict)  # by pass, then by side

    @property
    def model(self) -> Model:
        return MODELS[self.name]

    def pair(self, which: str, peer: str) -> Pair:
        sides = self.timings[which]
        return Pair(sides["scaledot"], sides[peer])

    @property
    def passes(self) -> dict[str, Pair]:
        """Every pass against every peer."""
        return {f"{which}, {peer}": self.pair(which, peer) for which in self.timings for peer in PEERS}

    def rate(self, which: str, side: str) -> float:
        """Tokens or samples per second."""
        return self.amount / self.timings[which][side].median


def run_model(name: str, dtype: str, quick: bool, effort: Effort, step: Callable[[str], None]) -> ModelRow:
    """Checks the model and, if its results are right, times it. Calls `step` with the name of each part before it."""
    step("check")
    subject = Subject(MODELS[name], dtype, quick)
    row = ModelRow(name, dtype, subject.built.shape, subject.built.amount, check(subject))
    if row.verdict.passed:
        step("timing")
        timed = alternate_parts(tuple(subject.parts(side) for side in SIDES), effort)
        row.timings = _by_pass(subject.model, dict(zip(SIDES, timed, strict=True)))
    return row


def _by_pass(model: Model, timed: dict[str, dict[str, Timing]]) -> dict[str, Sides]:
    if model.trains:
        timed = {side: {**parts, STEP: _sum(list(parts.values()))} for side, parts in timed.items()}
    return {which: {side: parts[which] for side, parts in timed.items()} for which in model.passes}


def _sum(parts: list[Timing]) -> Timing:
    """The timing of all parts together, reading by reading."""
    readings = zip(*(part.readings for part in parts), strict=True)
    return Timing(tuple(map(sum, readings)), parts[0].calls)
