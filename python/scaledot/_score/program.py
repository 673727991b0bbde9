"""Score programs, which kernels run: a list of operations and registers, made of a score function's graph.

csrc/core/score_program.h says what a program is.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import cache

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .._load import OPS
from .derivative import derivatives
from .graph import BOTH, COMMUTES, CONSTANT, SPACES, Graph, Load, Node

__all__ = ["HEADER", "captured_by", "has_mask", "mask_part", "operation_names", "program_part"]

# Words of a program before its parts: batches, CapturedBy, and the lengths of the forward's and the backward's part.
# After these comes the mask, if there is one.
HEADER = 4


@cache
def operation_names() -> list[str]:
    """The operations of programs, in the order of their numbers."""
    with _disable_current_modes():
        return list(OPS.score_operations())


@cache
def _numbers() -> dict[str, int]:
    return {name: k for k, name in enumerate(operation_names())}


def has_mask(program: Tensor) -> bool:
    """Whether the program says which tiles it masks."""
    return HEADER + int(program[2]) + int(program[3]) < len(program)


def program_part(graph: Graph, result: int, score: int, tables: frozenset[int] | None) -> list[int]:
    """The forward's part of a program, or the backward's with the gradients of `tables`. None: the forward's."""
    slope, gradients = graph.number(0.0), []
    if tables is not None:
        loads = {load.node: load for load in graph.loads if load.table in tables}
        slopes = derivatives(graph, result, [score, *loads])
        slope = slopes.pop(score, slope)
        gradients = [(loads[node].index, factor) for node, factor in slopes.items()]
    registers = _Registers(graph, score, result, slope, [node for pair in gradients for node in pair])
    return registers.words(result, slope, gradients)


def mask_part(graph: Graph, result: int, score: int) -> list[int]:
    """The mask's part: a program that is 0 where the result is -inf, whatever the score is.

    Empty if no such place is known.
    """
    of_score = {score}
    for k, node in enumerate(graph.nodes):
        if not of_score.isdisjoint(node.operands):
            of_score.add(k)
    needed = _needed(graph, [result])
    bounds = [k for k in needed if graph.nodes[k].operation in ("bound", "float_bound")]
    live: dict[int, int] = {}
    for k in needed:
        found = _live(graph, graph.nodes[k], live, of_score)
        if found is not None:
            live[k] = found
    shown = live.get(result)
    if shown is None or not of_score.isdisjoint(bounds):
        return []
    nothing = graph.number(0.0)
    return _Registers(graph, score, shown, nothing, bounds).words(shown, nothing, [])


def _live(graph: Graph, node: Node, live: dict[int, int], of_score: set[int]) -> int | None:
    """A value that is 0 only where the node's is -inf. `live`: those of nodes before it.

    Where a score is NaN, the result may have to be NaN. So nothing that reads it may be added to -inf.
    """
    operation, operands = node.operation, node.operands
    if operation == "constant" and node.value == -math.inf:
        return graph.number(0.0)
    if operation == "select" and not live.keys().isdisjoint(operands[1:]):
        a, b = (live.get(k, graph.number(1.0)) for k in operands[1:])
        return graph.add("maximum", a, b) if operands[0] in of_score else graph.add("select", operands[0], a, b)
    if operation not in ("add", "subtract", "multiply", "divide"):
        return None
    for a, b in (operands, operands[::-1]) if operation in COMMUTES else (operands,):
        if a in live and b not in of_score:
            finite = graph.add("less", graph.add("absolute", b), graph.number(1e38))
            if operation in ("multiply", "divide"):
                finite = graph.add("multiply", finite, graph.add("less", graph.number(0.0), b))
            return graph.add("maximum", live[a], graph.one_minus(finite))
    return None


def captured_by(graph: Graph, tables: frozenset[int]) -> int:
    """Which KV groups load different numbers: 0 none, 1 those of different heads, 2 all (CapturedBy)."""
    places = [_indexed_by(graph, load) for load in graph.loads if load.table in tables]
    by_head = all("head" in found for found in places)
    return 0 if not by_head else 2 if all("batch" in found for found in places) else 1


def _indexed_by(graph: Graph, load: Load) -> set[str]:
    return {graph.nodes[graph.as_integer(place)].operation for place in load.places}


class _Registers:
    """Registers for the values that `outputs` depend on.

    Those of a single score are used again once nothing reads them any more; the others exist once a tile.
    """

    def __init__(self, graph: Graph, score: int, result: int, slope: int, later: Sequence[int]) -> None:
        """`score`: the dot product; `result`: what becomes of it; `later`: read after the row of scores is gone."""
        self._graph = graph
        outputs = [result, slope, *later]
        self._nodes = _needed(graph, outputs)
        self._register: dict[int, int] = {}
        # An operand that an operation does not have is constant 0. Score 0 is the row of scores itself: it has the dot
        # product, and then the result, if nothing reads the product any more.
        self._counts = [0] * SPACES
        self._counts[CONSTANT] = self._counts[BOTH] = 1
        last = {operand: k for k in self._nodes for operand in graph.nodes[k].operands}
        last.update(dict.fromkeys(outputs, len(graph.nodes)))
        in_place = {score} - set(later)
        if result not in later and (score not in in_place or last.get(score, 0) <= result):
            in_place.add(result)
        free: list[int] = []
        for k in self._nodes:
            space = graph.spaces[k]
            done = [o for o in dict.fromkeys(graph.nodes[k].operands) if graph.spaces[o] == BOTH and last[o] == k]
            # Numbers and integers have different sizes, so a result may replace an operand of its kind only.
            alike = [o for o in done if graph.is_integer(o) == graph.is_integer(k)]
            if space == BOTH:
                free += [self._register[o] for o in alike if self._register[o] > 0]
                if k in in_place:
                    self._register[k] = 0
                else:
                    self._register[k] = free.pop() if free else self._new(BOTH)
                free += [self._register[o] for o in done if o not in alike and self._register[o] > 0]
            else:
                self._register[k] = self._new(space)

    def _new(self, space: int) -> int:
        self._counts[space] += 1
        return self._counts[space] - 1

    def _place(self, node: int | None) -> list[int]:
        return [CONSTANT, 0] if node is None else [self._graph.spaces[node], self._register[node]]

    def words(self, result: int, slope: int, gradients: Sequence[tuple[int, int]]) -> list[int]:
        spaces = [self._graph.spaces[k] for k in self._nodes]
        words = [*(spaces.count(space) for space in range(SPACES)), *self._counts]
        words += [*self._place(result), *self._place(slope), len(gradients)]
        for index, factor in gradients:
            words += self._place(index) + self._place(factor)
        for k in sorted(self._nodes, key=lambda k: self._graph.spaces[k]):  # stable
            node = self._graph.nodes[k]
            operands: list[int | None] = [*node.operands, None, None, None]
            words += [_numbers()[node.operation], *self._place(k)]
            words += [word for operand in operands[:3] for word in self._place(operand)]
            words.append(_bits(node.value) if node.operation == "constant" else int(node.value))
        return words


def _needed(graph: Graph, outputs: Sequence[int]) -> list[int]:
    needed, waiting = set(), list(outputs)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += graph.nodes[node].operands
    return sorted(needed)


def _bits(number: float) -> int:
    """The bits of a double, as a signed integer."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])
