"""Times two calls in turn: A B A B ..., so that a machine that slows down slows both."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.benchmark import Measurement, TaskSpec
from torch.utils.benchmark import timer as clock  # waits for the GPU first, where there is one

_BLOCK = 2e-3  # seconds that one reading should last: far above what reading the clock takes


@dataclass(frozen=True)
class Effort:
    """How long to time one side of one case."""

    seconds: float
    least: int  # readings


@dataclass(frozen=True)
class Timing:
    """Seconds a call, one number a reading, and how many calls a reading spans."""

    readings: tuple[float, ...]
    calls: int

    @property
    def _measurement(self) -> Measurement:
        task = TaskSpec(stmt="", setup="")
        return Measurement(self.calls, [reading * self.calls for reading in self.readings], task)

    @property
    def median(self) -> float:
        return float(self._measurement.median)

    @property
    def iqr(self) -> float:
        return float(self._measurement.iqr) if len(self.readings) > 1 else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "median": self.median,
            "iqr": self.iqr,
            "min": min(self.readings),
            "max": max(self.readings),
            "calls_per_reading": self.calls,
            "readings": list(self.readings),
        }


def _reading(call: Callable[[], Any], calls: int) -> float:
    begin = clock()
    for _ in range(calls):
        call()
    return float(clock() - begin) / calls


@contextmanager
def _without_collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def alternate(calls: tuple[Callable[[], Any], ...], effort: Effort) -> tuple[Timing, ...]:
    """Times the calls in turn, until each has had its seconds and its least number of readings."""
    readings: list[list[float]] = [[] for _ in calls]
    with _without_collector():
        for call in calls:
            call()  # the first call allocates, and may compile
        counts = [max(1, math.ceil(_BLOCK / max(_reading(call, 1), 1e-9))) for call in calls]
        spent = 0.0
        while len(readings[0]) < effort.least or spent < effort.seconds * len(calls):
            for call, count, sink in zip(calls, counts, readings, strict=True):
                sink.append(_reading(call, count))
                spent += sink[-1] * count
    return tuple(Timing(tuple(sink), count) for sink, count in zip(readings, counts, strict=True))
