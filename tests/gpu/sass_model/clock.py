"""The time of a steady loop: one sub-partition of a multiprocessor, with one warp of each consumer warpgroup.

A cycle issues at most one instruction. Each unit is busy for the cycles that pipes.py states. Products queue at the
tensor cores. Named barriers of 256 threads are turns if a warp arrives at them without waiting, and meetings of all
warps otherwise. Memory is never late. Neither clock rates nor power are part of the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from .disassembly import Instruction
from .pipes import CYCLES, Product, kind_of

LATENCY = {"MUFU": 22, "F2F": 22, "I2F": 22, "F2I": 22, "SHFL": 26, "LDS": 30, "LDSM": 33, "R2UR": 12, "LDC": 35}
LATENCY |= {"LDG": 500, "SYNCS": 40, "BAR": 30, "STS": 30, "STSM": 30}
OTHER_LATENCY = 25
READ_LATENCY = 12  # until operands are read
PRODUCT_LATENCY = 20  # from the end of a product to the warp that waits for it
TURN_LATENCY, MEETING_LATENCY = 12, 15
ALL_THREADS = 256  # of the barriers that consumers share

ROUNDS, FIRST = 12, 4  # of the loop; the first ones do not count


@dataclass(frozen=True)
class Step:
    kind: str  # of pipes.py, or "wait", "arrive", "sync"
    stall: int
    writes: int
    reads: int
    waits: int
    latency: int
    product: Product | None = None
    number: int = 0  # of pending groups, or of the barrier's threads


def step_of(instruction: Instruction) -> Step:
    kind, product, number = kind_of(instruction), None, 0
    if kind == "tensor":
        product = Product.of(instruction)
    elif instruction.name == "WARPGROUP" and "DEPBAR" in instruction.opcode:
        found = re.search(r"gsb0, 0x(\w+)", instruction.text)
        kind, number = "wait", int(found.group(1), 16) if found else 0
    elif instruction.name == "BAR":
        found = re.search(r",\s*0x(\w+)\s*$", instruction.text)
        kind, number = "sync" if "SYNC" in instruction.opcode else "arrive", int(found.group(1), 16) if found else 0
    latency = LATENCY.get(instruction.name, OTHER_LATENCY)
    stall = max(instruction.stall, 1)
    return Step(kind, stall, instruction.writes, instruction.reads, instruction.waits, latency, product, number)


@dataclass
class Warp:
    program: list[Step]
    at: int = 0
    rounds: int = 0
    ready: float = 0
    counters: list[float] = field(default_factory=lambda: [0.0] * 8)
    groups: list[float] = field(default_factory=list)  # when each group of products that was not waited for ends
    turn: float | None = None  # when it was given the turn
    meets: bool = False  # waits for the others
    ends: list[float] = field(default_factory=list)  # of its rounds

    def earliest(self, free: dict[str, float], turns: bool) -> float | None:
        """When its next instruction can issue; None if that depends on another warp."""
        step = self.program[self.at]
        if self.meets or self.rounds >= ROUNDS:
            return None
        time = max(self.ready, free.get(step.kind, 0.0))
        for k in range(6):
            if step.waits >> k & 1:
                time = max(time, self.counters[k])
        if step.kind == "wait" and len(self.groups) > step.number:
            time = max(time, self.groups[len(self.groups) - step.number - 1] + PRODUCT_LATENCY)
        if turns and step.kind == "sync" and step.number == ALL_THREADS:
            return None if self.turn is None else max(time, self.turn)
        return time


def period(path: Sequence[Instruction], consumers: int) -> float:
    """Cycles of one round of the loop in each of the consumers, in the long run."""
    program = [step_of(instruction) for instruction in path]
    turns = any(step.kind == "arrive" and step.number == ALL_THREADS for step in program)
    warps = [Warp(program) for _ in range(consumers)]
    warps[0].turn = 0.0
    free = {"tensor": 0.0, **dict.fromkeys(CYCLES, 0.0)}
    queue_end, time, last = 0.0, 0.0, 0
    while min(warp.rounds for warp in warps) < ROUNDS:
        order = [(last + k) % consumers for k in range(consumers)]
        times = [(at, w) for w in order if (at := warps[w].earliest(free, turns)) is not None]
        if not times:
            raise ValueError("deadlock: every warp waits for another")
        at, w = min(times, key=lambda found: found[0])
        time, warp, step = max(time, at), warps[w], warps[w].program[warps[w].at]
        if step.kind in CYCLES:
            free[step.kind] = time + CYCLES[step.kind]
        if step.product:
            queue_end = max(time, queue_end) + step.product.cycles
            if step.product.ends_group:
                warp.groups.append(queue_end)
        elif step.kind == "wait":
            warp.groups = warp.groups[len(warp.groups) - step.number :] if step.number else []
        if step.writes < 6:
            warp.counters[step.writes] = max(warp.counters[step.writes], time + step.latency)
        if step.reads < 6:
            warp.counters[step.reads] = max(warp.counters[step.reads], time + READ_LATENCY)
        warp.ready = time + step.stall
        if step.number == ALL_THREADS and step.kind in ("sync", "arrive"):
            _pass_barrier(warps, w, step, turns, time)
        time += 1
        last = (w + 1) % consumers
        warp.at += 1
        if warp.at == len(program):
            warp.at, warp.rounds = 0, warp.rounds + 1
            warp.ends.append(time)
    ends = warps[0].ends
    return (ends[-3] - ends[FIRST]) / (len(ends) - 3 - FIRST)


def _pass_barrier(warps: list[Warp], w: int, step: Step, turns: bool, time: float) -> None:
    if turns and step.kind == "sync":
        warps[w].turn = None
    elif turns:
        warps[(w + 1) % len(warps)].turn = time + TURN_LATENCY
    else:
        warps[w].meets = True
        if all(warp.meets for warp in warps):
            for warp in warps:
                warp.meets, warp.ready = False, time + step.stall + MEETING_LATENCY
