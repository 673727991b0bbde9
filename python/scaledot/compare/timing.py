"""Times calls in turn, A B A B ..., so that a slower machine slows all."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.benchmark import Measurement, TaskSpec
from torch.utils.benchmark import timer as clock  # synchronises with the GPU, if there is one

_BLOCK = 2e-3  # seconds per reading, far longer than reading the clock takes

_Reader = Callable[[int], tuple[float, ...]]  # from a number of calls to the seconds per call of each part


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


def _reading_of_parts(parts: Sequence[Callable[[], Any]], calls: int) -> tuple[float, ...]:
    spent = [0.0] * len(parts)
    for _ in range(calls):
        for number, part in enumerate(parts):
            begin = clock()
            part()
            spent[number] += float(clock() - begin)
    return tuple(seconds / calls for seconds in spent)


def alternate(calls: tuple[Callable[[], Any], ...], effort: Effort) -> tuple[Timing, ...]:
    """Times the calls in turn, until each has its minimum number of readings and the total is `seconds` per call."""

    def reader(call: Callable[[], Any]) -> _Reader:
        return lambda count: (_reading(call, count),)

    return tuple(timing for (timing,) in _in_turn(tuple(map(reader, calls)), effort))


def alternate_parts(sides: tuple[dict[str, Callable[[], Any]], ...], effort: Effort) -> tuple[dict[str, Timing], ...]:
    """Does `alternate` for sides that consist of parts. A side's parts are called in order, and timed separately."""

    def reader(side: dict[str, Callable[[], Any]]) -> _Reader:
        return lambda count: _reading_of_parts(tuple(side.values()), count)

    timings = _in_turn(tuple(map(reader, sides)), effort)
    return tuple(dict(zip(side, parts, strict=True)) for side, parts in zip(sides, timings, strict=True))


def _in_turn(readers: tuple[_Reader, ...], effort: Effort) -> list[tuple[Timing, ...]]:
    readings: list[list[tuple[float, ...]]] = [[] for _ in readers]
    with _without_collector():
        for read in readers:
            read(1)  # warm-up: the first call allocates and may compile
        counts = [max(1, math.ceil(_BLOCK / max(sum(read(1)), 1e-9))) for read in readers]
        spent = 0.0
        while len(readings[0]) < effort.least or spent < effort.seconds * len(readers):
            for read, count, sink in zip(readers, counts, readings, strict=True):
                sink.append(read(count))
                spent += sum(sink[-1]) * count
    return [
        tuple(Timing(part, count) for part in zip(*sink, strict=True))
        for sink, count in zip(readings, counts, strict=True)
    ]
