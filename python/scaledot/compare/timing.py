"""Times two calls in turn, A B A B ..., so that a slower machine slows both."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.benchmark import Measurement, TaskSpec
from torch.utils.benchmark import timer as clock  # synchronises with the GPU, if there is one

_BLOCK = 2e-3  # seconds per reading, far longer than reading the clock takes


@dataclass(frozen=True)
class Effort:
    """How long to time each side of a case."""

    seconds: float
    least: int  # the minimum number of readings


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one number per reading; and the number of calls in a reading."""

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
    """Times the calls in turn, until each has its minimum number of readings and the total is `seconds` per call."""
    readings: list[list[float]] = [[] for _ in calls]
    with _without_collector():
        for call in calls:
            call()  # warm-up: the first call allocates and may compile
        counts = [max(1, math.ceil(_BLOCK / max(_reading(call, 1), 1e-9))) for call in calls]
        spent = 0.0
        while len(readings[0]) < effort.least or spent < effort.seconds * len(calls):
            for call, count, sink in zip(calls, counts, readings, strict=True):
                sink.append(_reading(call, count))
                spent += sink[-1] * count
    return tuple(Timing(tuple(sink), count) for sink, count in zip(readings, counts, strict=True))
