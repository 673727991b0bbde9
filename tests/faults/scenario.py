"""Scenarios: which fault happens to which rank, and where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

TIMEOUT = 5.0  # seconds: of the process group, where a fault makes ranks wait for it
LONG_TIMEOUT = 60.0  # seconds, where every rank has to have its results, on a busy machine too
SETUP = 60.0  # seconds for the processes to connect, which is not what is tested
STOPPED = 10.0  # seconds that a rank is stopped, longer than the group waits
PAUSED = 1.5  # seconds that a rank is stopped, shorter than the group waits
SLOW = 0.15  # seconds that a slow rank waits before each transfer

METHODS: dict[str, tuple[Any, tuple[int, ...]]] = {  # the method and the shape of the mesh
    "ring": ("ring", (3,)),
    "all_to_all": ("all_to_all", (2,)),
    "both": (("ring", "all_to_all"), (2, 2)),
}
AT_EVERY_POINT = ("kill", "stop", "pause", "raise")
HARMLESS = ("none", "pause", "slow")  # every rank has to have the right results

# What a rank does instead of the call that the others make, by name, and where.
OTHERWISE = {
    "before": ("other is_causal", "other dtype", "other shape", "other method", "bad argument", "no call"),
    "between": ("no backward", "another call"),
}
# Those that the ranks notice when they compare their arguments, so that all of them end at once.
COMPARED = ("other is_causal", "other dtype", "other shape", "other method", "bad argument")


@dataclass(frozen=True)
class Point:
    """`phase`: before the call, inside the forward, between forward and backward, or inside the backward.

    Inside, `number` counts the transfers of the victim in this phase; the fault comes before that one.
    """

    phase: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.phase} {self.number}" if self.phase in ("forward", "backward") else self.phase


@dataclass(frozen=True)
class Scenario:
    method: str
    fault: str
    point: Point
    victim: int

    @property
    def ranks(self) -> int:
        count = 1
        for size in METHODS[self.method][1]:
            count *= size
        return count

    @property
    def timeout(self) -> float:
        """Seconds: of the process group."""
        return LONG_TIMEOUT if self.fault in HARMLESS else TIMEOUT

    def __str__(self) -> str:
        return f"{self.method}, rank {self.victim} of {self.ranks}, {self.fault}, {self.point}"


def clean_runs() -> list[Scenario]:
    return [Scenario(method, "none", Point("before"), 0) for method in METHODS]


def scenarios(transfers: Mapping[tuple[str, int], tuple[int, int]]) -> Iterator[Scenario]:
    """All of them. `transfers`: of each method and rank, in the forward and the backward of a clean run."""
    for (method, victim), (forward, backward) in transfers.items():
        points = [
            Point("before"),
            *(Point("forward", k) for k in range(forward)),
            Point("between"),
            *(Point("backward", k) for k in range(backward)),
        ]
        for point in points:
            for fault in AT_EVERY_POINT:
                yield Scenario(method, fault, point, victim)
        yield Scenario(method, "slow", Point("before"), victim)
        for phase, faults in OTHERWISE.items():
            for fault in faults:
                yield Scenario(method, fault, Point(phase), victim)


def slice_of(all_of_them: list[Scenario]) -> list[Scenario]:
    """A few for each method: each fault at one point, that moves on from fault to fault."""
    chosen = []
    for method in METHODS:
        for k, fault in enumerate(dict.fromkeys(scenario.fault for scenario in all_of_them)):
            fitting = [s for s in all_of_them if (s.method, s.fault) == (method, fault)]
            chosen.append(fitting[(2 * k + 1) * len(fitting) // 9 % len(fitting)])
    return chosen
