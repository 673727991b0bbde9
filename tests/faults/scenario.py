"""Scenarios: which fault happens to which rank or to the network, and where."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from faults.network import Link

TIMEOUT = 5.0  # seconds: of the process group, where a fault makes ranks wait for it
LONG_TIMEOUT = 60.0  # seconds, where every rank has to have its results, on a busy machine too
SETUP = 60.0  # seconds for the processes to connect, which is not what is tested
STOPPED = 10.0  # seconds that a rank is stopped, longer than the group waits
PAUSED = 1.5  # seconds that a rank is stopped, shorter than the group waits
SLOW = 0.15  # seconds that a slow rank waits before each transfer
CUT = 1.5  # seconds that a link is cut, shorter than the group waits

LENGTH = 26  # positions
LONG = 1300  # positions, for more packets: about 50 times as many bytes

METHODS: dict[str, tuple[Any, tuple[int, ...]]] = {  # the method and the shape of the mesh
    "ring": ("ring", (3,)),
    "all_to_all": ("all_to_all", (2,)),
    "both": (("ring", "all_to_all"), (2, 2)),
}
AT_EVERY_POINT = ("kill", "stop", "pause", "raise")
# From the point on, of every link until the end.
LINKS = {
    "delay": Link(delay=0.06, jitter=0.04),
    "loss of 1%": Link(delay=0.001, loss=0.01),
    "loss of 5%": Link(delay=0.001, loss=0.05),
    "little bandwidth": Link(bandwidth=1e6),
}
CUTS_FOR_A_TIME = ("link cut for a time", "rank cut off for a time")
CUTS = ("link cut", "rank cut off")  # for good
# Every rank has to have the right results.
HARMLESS = ("none", "pause", "slow", *LINKS, *CUTS_FOR_A_TIME)

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
    """`on_network`: each rank has its own network namespace, instead of the loopback interface of this machine."""

    method: str
    fault: str
    point: Point
    victim: int
    on_network: bool = False
    length: int = LENGTH

    @property
    def ranks(self) -> int:
        return math.prod(METHODS[self.method][1])

    @property
    def timeout(self) -> float:
        """Seconds: of the process group."""
        return LONG_TIMEOUT if self.fault in HARMLESS else TIMEOUT

    @property
    def cut_links(self) -> list[tuple[int, int]]:
        """The pairs of ranks between which a cut drops all packets."""
        if self.fault.startswith("rank"):
            return [(self.victim, other) for other in range(self.ranks) if other != self.victim]
        size = METHODS[self.method][1][-1]  # the neighbour in the mesh's last dimension
        first = self.victim // size * size
        return [(self.victim, first + (self.victim - first + 1) % size)]

    def __str__(self) -> str:
        return f"{self.method}, rank {self.victim} of {self.ranks}, {self.fault}, {self.point}"


def clean_runs(on_network: bool = False) -> list[Scenario]:
    lengths = (LENGTH, LONG) if on_network else (LENGTH,)
    return [Scenario(method, "none", Point("before"), 0, on_network, n) for method in METHODS for n in lengths]


def _points(forward: int, backward: int) -> list[Point]:
    """All of a rank that makes this number of transfers."""
    return [
        Point("before"),
        *(Point("forward", k) for k in range(forward)),
        Point("between"),
        *(Point("backward", k) for k in range(backward)),
    ]


def scenarios(transfers: Mapping[tuple[str, int], tuple[int, int]]) -> Iterator[Scenario]:
    """All of them. `transfers`: of each method and rank, in the forward and the backward of a clean run."""
    for (method, victim), (forward, backward) in transfers.items():
        for point in _points(forward, backward):
            for fault in AT_EVERY_POINT:
                yield Scenario(method, fault, point, victim)
        yield Scenario(method, "slow", Point("before"), victim)
        for phase, faults in OTHERWISE.items():
            for fault in faults:
                yield Scenario(method, fault, Point(phase), victim)


def network_scenarios(transfers: Mapping[tuple[str, int], tuple[int, int]]) -> Iterator[Scenario]:
    """Those of the network; `transfers` as for scenarios(). The ranks take turns as the victim of a cut."""
    for (method, victim), (forward, backward) in transfers.items():
        points = _points(forward, backward)
        for fault in LINKS:
            yield Scenario(method, fault, points[0], victim, True, LONG)
        ranks = math.prod(METHODS[method][1])
        for k, fault in itertools.product(range(victim, len(points), ranks), (*CUTS_FOR_A_TIME, *CUTS)):
            yield Scenario(method, fault, points[k], victim, True)


def slice_of(all_of_them: list[Scenario]) -> list[Scenario]:
    """A few for each method: each fault at one point, that moves on from fault to fault."""
    chosen = []
    for method in METHODS:
        for k, fault in enumerate(dict.fromkeys(scenario.fault for scenario in all_of_them)):
            fitting = [s for s in all_of_them if (s.method, s.fault) == (method, fault)]
            chosen.append(fitting[(2 * k + 1) * len(fitting) // 9 % len(fitting)])
    return chosen
