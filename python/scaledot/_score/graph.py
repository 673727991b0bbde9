"""A score function as a graph of operations, simplified while it is built."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BOTH", "COMMUTES", "CONSTANT", "SMALL", "SPACES", "Graph", "Load", "Node"]

# The spaces of values, as in csrc/core/score_program.h: a value of DISTANCE depends on key - row and on the head, and
# one of BOTH on the row and the key in any other way.
SPACES = 6
CONSTANT, HEAD, ROW, KEY, DISTANCE, BOTH = range(SPACES)
_SPACES = {"batch": HEAD, "head": HEAD, "row": ROW, "key": KEY, "distance": DISTANCE, "score": BOTH}
_ALIKE = (CONSTANT, HEAD, ROW)  # the same for all keys of a row
_NEUTRAL = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "divide": 1.0}  # right operands that change nothing
_INT_NEUTRAL = {"int_add": 0, "int_subtract": 0, "int_multiply": 1}
COMMUTES = ("add", "multiply", "int_add", "int_multiply")

# Integers that are small enough are computed as floating numbers, exactly. A vector has more of these, and most
# integers end up as such. Positions are then at most `SMALL`; larger calls are traced with integers.
SMALL = 1 << 22
_EXACT = 1 << 24  # float32 has all integers up to here
_FLOATING = {
    "int_add": "add",
    "int_subtract": "subtract",
    "int_multiply": "multiply",
    "int_minimum": "minimum",
    "int_maximum": "maximum",
    "int_less": "less",
    "int_equal": "equal",
    "int_select": "select",
}
_Range = tuple[int, int]  # the least and the largest value of an integer


@dataclass(frozen=True)
class Node:
    """One operation on values before it."""

    operation: str
    operands: tuple[int, ...] = ()
    # A constant's number; the size of a bound's dimension; 1 for a load of neighbouring numbers; a distance's sign.
    value: float | int = 0


@dataclass(frozen=True)
class Load:
    """A load of a number that may get a gradient."""

    node: int
    index: int  # the node of its place among all captured numbers
    table: int  # the number of its tensor
    shape: tuple[int, ...]  # of the tensor
    places: tuple[int, ...]  # an index for each dimension


class Graph:
    """Operations in an order in which each comes after its operands. Equal ones are one."""

    def __init__(self, small: bool = False) -> None:
        """`small`: no position is above `SMALL`."""
        self._places: _Range | None = (0, SMALL) if small else None
        self.ranges: dict[int, _Range] = {}  # of integers, as far as they are known
        self.nodes: list[Node] = []
        self.spaces: list[int] = []
        self.loads: list[Load] = []
        self._known: dict[Node, int] = {}

    # ------------------------------------------------------------------------------------------------- building
    def add(self, operation: str, *operands: int, value: float | int = 0) -> int:
        """The number of the operation's value."""
        simpler = self._simplified(operation, operands)
        if simpler is None and operation.startswith("int_"):
            simpler = self._as_floating(operation, operands)
        if simpler is None and operation in ("subtract", "less", "less_equal", "equal"):
            simpler = self._of_distance(operation, operands)
        if simpler is not None:
            return simpler
        if operation.startswith("int_"):
            first = 1 if operation == "int_select" else 0  # the condition is a floating number
            operands = (*operands[:first], *map(self.as_integer, operands[first:]))
        return self._added(Node(operation, operands, value))

    def _added(self, node: Node) -> int:
        operation, operands, value = node.operation, node.operands, node.value
        key = Node(operation, operands, repr(value))  # type: ignore[arg-type]  # 0.0 and -0.0 differ, NaN is itself
        if key not in self._known:
            self._known[key] = len(self.nodes)
            self.nodes.append(node)
            self.spaces.append(self._space(operation, operands))
            found = self._range(node)
            if found is not None:
                self.ranges[self._known[key]] = found
        return self._known[key]

    def _space(self, operation: str, operands: Sequence[int]) -> int:
        found = {self.spaces[operand] for operand in operands} | {_SPACES.get(operation, CONSTANT)}
        found -= {CONSTANT}
        # A distance in a tile may have masked scores, whose index may be out of bounds.
        if operation in ("bound", "float_bound") and found == {DISTANCE}:
            return BOTH
        for space in (CONSTANT, HEAD, ROW, KEY, DISTANCE):
            if found <= {space} or (found <= {HEAD, space} and space in (ROW, DISTANCE)):
                return space
        return BOTH

    # ---------------------------------------------------------------------------------------------- distances
    def linear(self, node: int) -> tuple[float, float, float] | None:
        """(a, b, c) of a floating node a * key + b * row + c; None for any other."""
        operation, operands = self.nodes[node].operation, self.nodes[node].operands
        if operation == "constant":
            return 0, 0, float(self.nodes[node].value)
        if operation == "to_float":
            place = self.nodes[operands[0]]
            sign = place.value
            return {"key": (1, 0, 0), "row": (0, 1, 0), "distance": (sign, -sign, 0)}.get(place.operation)
        if operation not in ("add", "subtract"):
            return None
        left, right = (self.linear(operand) for operand in operands)
        sign = 1 if operation == "add" else -1
        if left is None or right is None:
            return None
        return left[0] + sign * right[0], left[1] + sign * right[1], left[2] + sign * right[2]

    def _of_distance(self, operation: str, operands: Sequence[int]) -> int | None:
        """A difference or a comparison of small places in the rows and in the keys, made of their distance."""
        if self._places is None or {self.spaces[k] for k in operands} != {ROW, KEY}:
            return None
        left, right = (self.linear(operand) for operand in operands)
        if left is None or right is None:
            return None
        key, row, rest = (a - b for a, b in zip(left, right, strict=True))
        if (key, row) not in ((1, -1), (-1, 1)) or rest % 1 or abs(rest) > SMALL:
            return None
        number = self.as_number(self._added(Node("distance", (), int(key))))
        difference = self.add("add", number, self.number(rest))
        self.ranges[difference] = (int(rest) - SMALL, int(rest) + SMALL)
        return difference if operation == "subtract" else self.add(operation, difference, self.number(0.0))

    # ----------------------------------------------------------------------------- integers as floating numbers
    def _range(self, node: Node) -> _Range | None:
        """The values that an integer may have; None if they are not known, or if it is none."""
        operation, operands = node.operation, node.operands
        if operation in ("batch", "head", "row", "key"):
            return self._places
        if operation == "distance" and self._places is not None:
            return -SMALL, SMALL
        if operation == "int_constant":
            return int(node.value), int(node.value)
        if operation in ("bound", "float_bound"):
            return 0, max(int(node.value) - 1, 0)
        if operation == "to_float" and operands[0] in self.ranges:
            return self.ranges[operands[0]]
        if operation == "int_select" and all(k in self.ranges for k in operands[1:]):
            ends = [self.ranges[k] for k in operands[1:]]
            return min(low for low, _ in ends), max(high for _, high in ends)
        if operation in _FLOATING and all(k in self.ranges for k in operands) and len(operands) == 2:
            (a, b), (c, d) = (self.ranges[k] for k in operands)
            products = (a * c, a * d, b * c, b * d)
            return {
                "int_add": (a + c, b + d),
                "int_subtract": (a - d, b - c),
                "int_multiply": (min(products), max(products)),
                "int_minimum": (min(a, c), min(b, d)),
                "int_maximum": (max(a, c), max(b, d)),
            }.get(operation)
        return None

    def _as_floating(self, operation: str, operands: Sequence[int]) -> int | None:
        """The operation on floating numbers, if all integers in it are small. None otherwise."""
        integers = operands[1:] if operation == "int_select" else operands
        if self._places is None or not all(self._is_small(self.ranges.get(k)) for k in integers):
            return None
        if operation in ("int_floor_divide", "int_remainder"):
            return self._divided(operation, *operands)
        found = self._range(Node(operation, tuple(operands)))
        compares = operation in ("int_less", "int_equal")
        if operation not in _FLOATING or not (compares or self._is_small(found)):
            return None
        numbers = [k if k not in integers else self.as_number(k) for k in operands]
        result = self.add(_FLOATING[operation], *numbers)
        if not compares and found is not None:
            self.ranges[result] = found
        return result

    def _divided(self, operation: str, a: int, b: int) -> int | None:
        """Floor division, or its remainder, by a positive number: the rounded quotient has the exact one's floor."""
        (low, high), (divisor, most) = self.ranges[a], self.ranges[b]
        if divisor <= 0 or divisor != most:
            return None
        dividend, by = self.as_number(a), self.number(divisor)
        floor = self.add("floor", self.add("divide", dividend, by))
        self.ranges[floor] = (low // divisor, high // divisor)
        if operation == "int_floor_divide":
            return floor
        rest = self.add("subtract", dividend, self.add("multiply", floor, by))
        self.ranges[rest] = (0, divisor - 1)
        return rest

    def absolute(self, node: int) -> int:
        """The absolute value of an integer."""
        found = self.ranges.get(node)
        if self._places is None or found is None or not self._is_small(found):
            return self.add("int_maximum", node, self.add("int_subtract", self.integer(0), node))
        result = self.add("absolute", self.as_number(node))
        self.ranges[result] = (0, max(abs(found[0]), abs(found[1])))
        return result

    def wrapped(self, node: int, low: int, high: int) -> int:
        """An integer that wraps around at these ends, which are those of a number of bits."""
        found = self.ranges.get(node)
        if found is not None and low <= found[0] and found[1] <= high:
            return node
        if low == 0:
            result = self.add("int_and", node, self.integer(high))
        else:
            shift = self.integer(64 - (high - low).bit_length())
            result = self.add("int_shift_right", self.add("int_shift_left", node, shift), shift)
        self.ranges[result] = (low, high)
        return result

    @staticmethod
    def _is_small(found: _Range | None) -> bool:
        return found is not None and found[0] >= -_EXACT and found[1] <= _EXACT

    def as_number(self, node: int) -> int:
        """An integer as a floating number. It may be one already."""
        return self.add("to_float", node) if self.is_integer(node) else node

    def as_integer(self, node: int) -> int:
        return node if self.is_integer(node) else self.add("to_int", node)

    def number(self, value: float) -> int:
        return self.add("constant", value=float(value))

    def integer(self, value: int) -> int:
        return self.add("int_constant", value=int(value))

    def is_integer(self, node: int) -> bool:
        """Whether the value is in a register of integers."""
        operation = self.nodes[node].operation
        return operation in ("batch", "head", "row", "key", "distance", "to_int", "bound", "float_bound") or (
            operation.startswith("int_") and operation not in ("int_less", "int_equal")
        )

    def negative(self, node: int) -> int:
        return self.add("multiply", node, self.number(-1.0))

    def one_minus(self, node: int) -> int:
        return self.add("subtract", self.number(1.0), node)

    def _simplified(self, operation: str, operands: Sequence[int]) -> int | None:
        if operation in COMMUTES and self._is_constant(operands[0]) and not self._is_constant(operands[1]):
            return self.add(operation, operands[1], operands[0])
        if operation in _NEUTRAL or operation in _INT_NEUTRAL:
            right = self.nodes[operands[1]]
            neutral = _NEUTRAL.get(operation, _INT_NEUTRAL.get(operation))
            if right.operation in ("constant", "int_constant") and right.value == neutral:
                return operands[0]
        if operation == "select" or operation == "int_select":
            if operands[1] == operands[2]:
                return operands[1]
            condition = self.nodes[operands[0]]
            if condition.operation == "constant":
                return operands[1] if condition.value != 0 else operands[2]
        if operation == "to_float" and self.nodes[operands[0]].operation == "int_constant":
            value = int(self.nodes[operands[0]].value)
            number = self.number(value)
            self.ranges[number] = (value, value)
            return number
        if operation == "to_int" and self.nodes[operands[0]].operation == "to_float":
            return self.nodes[operands[0]].operands[0]
        return None

    def _is_constant(self, node: int) -> bool:
        return self.nodes[node].operation in ("constant", "int_constant")

    def step(self, node: int) -> int | None:
        """By how much an integer grows from one key to the next; None if that is not the same everywhere.

        A bound is taken for its operand: it is the same wherever no index is out of bounds or negative.
        """
        if self.spaces[node] in _ALIKE:
            return 0
        operation, operands = self.nodes[node].operation, self.nodes[node].operands
        if operation in ("key", "distance"):
            return int(self.nodes[node].value) if operation == "distance" else 1
        if operation in ("bound", "float_bound", "to_float", "to_int"):
            return self.step(operands[0])
        operation = operation.removeprefix("int_") if node in self.ranges else operation
        steps = [self.step(operand) for operand in operands]
        if operation == "add" and None not in steps:
            return sum(step for step in steps if step is not None)
        if operation == "subtract" and steps[0] is not None and steps[1] is not None:
            return steps[0] - steps[1]
        if operation == "multiply" and steps[0] is not None and self._is_constant(operands[1]):
            return steps[0] * int(self.nodes[operands[1]].value)
        return None

    def load(self, is_number: bool, table: int, offset: int, shape: Sequence[int], index: Sequence[int]) -> int:
        """The entry `index`, a node for each dimension, of a captured tensor that begins at `offset` in memory."""
        parts = {False: self.integer(offset), True: self.integer(0)}  # what rows decide, and the rest
        stride = math.prod(shape)
        for size, place in zip(shape, index, strict=True):
            stride //= max(size, 1)
            low, high = self.ranges.get(place, (-1, size))
            if low >= 0 and high < size:
                bound = self.as_integer(place)  # as after clamp
            else:
                bound = self.add("bound" if self.is_integer(place) else "float_bound", place, value=size)
            term = bound if stride == 1 else self._added(Node("int_multiply", (bound, self.integer(stride))))
            by_key = self.spaces[place] not in _ALIKE
            parts[by_key] = self._int_sum(parts[by_key], term)
        node = self.add("load" if is_number else "int_load", *parts.values(), value=int(self.step(parts[True]) == 1))
        if is_number:
            both = self._int_sum(*parts.values())
            self.loads.append(Load(node, both, table, tuple(shape), tuple(index)))
        return node

    def _int_sum(self, a: int, b: int) -> int:
        """A place in memory: it stays an integer."""
        if self.nodes[a] == Node("int_constant", (), 0):
            return b
        return a if self.nodes[b] == Node("int_constant", (), 0) else self._added(Node("int_add", (a, b)))
