"""Whether the readings can be trusted: their spread, and the load of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .run import Pair
from .timing import Timing

SPREAD_LIMIT = 0.25
"""A timing is noisy if its interquartile range is a larger share of its median."""

_OWN_THREADS = 0.5
"""How far the load average may exceed the cores after the run: our own threads may fill every core."""


class Timed(Protocol):
    """A row of a table."""

    @property
    def passes(self) -> Mapping[str, Pair]: ...


def load_average() -> float | None:
    """The system's load average over one minute, or None where the system has none."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def spread(timing: Timing) -> float:
    """IQR / median."""
    return timing.iqr / timing.median


def is_noisy(pair: Pair) -> bool:
    """Whether the spread of either side is above the limit."""
    sides = [pair.ours] if pair.peer is None else [pair.ours, pair.peer]
    return any(spread(side) > SPREAD_LIMIT for side in sides)


@dataclass(frozen=True)
class Load:
    """The load average before and after the run, next to the number of cores."""

    start: float | None
    end: float | None
    cores: int

    @property
    def too_high_at_start(self) -> bool:
        return self.start is not None and self.start > self.cores

    @property
    def too_high(self) -> bool:
        """Whether other programs took time from every reading."""
        at_end = self.end is not None and self.end > self.cores + _OWN_THREADS
        return self.too_high_at_start or at_end


def noisy_count(rows: Iterable[Timed]) -> tuple[int, int]:
    """(noisy, timed) passes."""
    pairs = [pair for row in rows for pair in row.passes.values()]
    return sum(map(is_noisy, pairs)), len(pairs)


def start_warnings(load: Load) -> list[str]:
    """The message before the run."""
    if not load.too_high_at_start:
        return []
    return [
        f"WARNING: the load average is {load.start:.1f} on {load.cores} cores before anything is timed: other programs "
        "are running, and the ratios will not be reliable."
    ]


def end_warnings(rows: Iterable[Timed], load: Load) -> list[str]:
    """The message after the run; empty if the readings can be trusted."""
    noisy, timed = noisy_count(rows)
    lines = []
    if noisy:
        lines.append(
            f"WARNING: {noisy} of {timed} timings, marked !, are too noisy to trust: an IQR is above "
            f"{SPREAD_LIMIT:.0%} of its median. Stop other programs, or time longer with --seconds."
        )
    if timed and load.too_high:
        start, end = ("unknown" if value is None else f"{value:.1f}" for value in (load.start, load.end))
        lines.append(
            f"WARNING: the load average was {start} at the start and {end} at the end on {load.cores} cores: other "
            "programs were running. Do not trust these ratios."
        )
    return lines


def noise_json(rows: Iterable[Timed], load: Load) -> dict[str, Any]:
    """The facts behind the warnings."""
    noisy, timed = noisy_count(rows)
    return {
        "spread_limit": SPREAD_LIMIT,
        "timings": timed,
        "noisy": noisy,
        "load_average": {"start": load.start, "end": load.end},
        "cores": load.cores,
        "load_too_high": load.too_high,
        "trusted": noisy == 0 and not load.too_high,
    }
