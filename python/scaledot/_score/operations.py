"""The operations of torch that a score function may use, and what they are in a graph.

Each rule gets the Trace (trace.py), the node of torch's graph, and the node's operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .graph import Graph

__all__ = ["ALL_GRADIENTS", "READS_VALUES", "RULES", "Table"]


@dataclass(frozen=True)
class Table:
    """A captured tensor, of which some dimensions have an index already."""

    number: int
    shape: tuple[int, ...]
    index: tuple[int | None, ...]  # nodes; None for a dimension without an index

    def left(self) -> list[int]:
        return [dim for dim, place in enumerate(self.index) if place is None]

    def at(self, places: dict[int, int]) -> Table:
        """`places`: from the dimensions that are left, by their numbers among these, to nodes."""
        index = list(self.index)
        for k, dim in enumerate(self.left()):
            if k in places:
                index[dim] = places[k]
        return Table(self.number, self.shape, tuple(index))


_Rule = Callable[..., Any]
ALL_GRADIENTS = "all parts with their gradients, or a captured tensor that is detached before it is indexed"
READS_VALUES = (
    "score_mod: got a function that reads the number in a tensor; needs operations on tensors, such as torch.where in "
    "place of if, or a number that is read before the call"
)
_BY_ZERO = "score_mod: got a division of an integer by 0; needs another divisor"


def _integral(trace: Any, node: fx.Node) -> bool:
    return not node.meta["val"].dtype.is_floating_point


def _joint_integral(*operands: Any) -> bool:
    """Whether operands are compared as integers."""
    return all(
        not operand.meta["val"].dtype.is_floating_point if isinstance(operand, fx.Node) else isinstance(operand, int)
        for operand in operands
    )


def _unary(operation: str) -> _Rule:
    return lambda trace, node, a, **_: trace.graph.add(operation, trace.value(a, integer=False))


def _of_number(term: Callable[[Graph, int], int]) -> _Rule:
    return lambda trace, node, a, **_: term(trace.graph, trace.value(a, integer=False))


def _binary(operation: str) -> _Rule:
    """An operation that has a form for integers."""

    def rule(trace: Any, node: fx.Node, a: Any, b: Any, *, alpha: Any = 1) -> int:
        integer = _integral(trace, node)
        f, prefix = trace.graph, "int_" if integer else ""
        if integer and b == 0 and operation in ("remainder", "fmod"):
            raise ValueError(_BY_ZERO)
        left, right = trace.value(a, integer), trace.value(b, integer)
        if alpha != 1:
            right = f.add(prefix + "multiply", right, trace.value(alpha, integer))
        return f.add(prefix + operation, left, right)

    return rule


def _reversed(rule: _Rule) -> _Rule:
    return lambda trace, node, a, b, *rest, **kwargs: rule(trace, node, b, a, *rest, **kwargs)


def _compare(operation: str, swaps: bool = False, negates: bool = False) -> _Rule:
    def rule(trace: Any, node: fx.Node, a: Any, b: Any) -> int:
        f, integer = trace.graph, _joint_integral(a, b)
        left, right = trace.value(a, integer), trace.value(b, integer)
        if swaps:
            left, right = right, left
        if operation == "less_equal" and integer:
            return f.add("subtract", f.number(1.0), f.add("int_less", right, left))
        truth = f.add("int_" + operation if integer else operation, left, right)
        return f.add("subtract", f.number(1.0), truth) if negates else truth

    return rule


def _truth(trace: Any, operand: Any) -> int:
    """An operand as 0 or 1."""
    f, value = trace.graph, trace.value(operand, integer=False)
    if isinstance(operand, fx.Node) and operand.meta["val"].dtype == torch.bool:
        return value
    return f.add("subtract", f.number(1.0), f.add("equal", value, f.number(0.0)))


def _logic(term: Callable[[Graph, int, int], int], bits: str | None = None) -> _Rule:
    """`bits`: what it is on integers, if those are not taken as truth values."""

    def rule(trace: Any, node: fx.Node, a: Any, b: Any) -> int:
        if bits is not None and node.meta["val"].dtype != torch.bool:
            return trace.graph.add(bits, trace.value(a, integer=True), trace.value(b, integer=True))
        return term(trace.graph, _truth(trace, a), _truth(trace, b))

    return rule


def _differ(f: Graph, a: int, b: int) -> int:
    return f.add("subtract", f.number(1.0), f.add("equal", a, b))


def _not(bits: bool) -> _Rule:
    def rule(trace: Any, node: fx.Node, a: Any) -> int:
        f = trace.graph
        if bits and node.meta["val"].dtype != torch.bool:
            return f.add("int_xor", trace.value(a, integer=True), f.integer(-1))
        return f.add("subtract", f.number(1.0), _truth(trace, a))

    return rule


def _select(trace: Any, node: fx.Node, condition: Any, a: Any, b: Any) -> int:
    integer = _integral(trace, node) and node.meta["val"].dtype != torch.bool
    operation = "int_select" if integer else "select"
    return trace.graph.add(operation, _truth(trace, condition), trace.value(a, integer), trace.value(b, integer))


def _clamp(trace: Any, node: fx.Node, a: Any, low: Any = None, high: Any = None, **named: Any) -> int:
    low, high = named.get("min", low), named.get("max", high)
    integer, f = _integral(trace, node), trace.graph
    value = trace.value(a, integer)
    for end, lowest in ((low, True), (high, False)):
        if end is None:
            continue
        limit = trace.value(end, integer)
        if integer:
            value = f.add("int_maximum" if lowest else "int_minimum", value, limit)
        else:  # a score at an end has a derivative of 1, and NaN stays
            beyond = f.add("less", value, limit) if lowest else f.add("less", limit, value)
            value = f.add("select", beyond, limit, value)
    return value


def _divide(trace: Any, node: fx.Node, a: Any, b: Any, *, rounding_mode: str | None = None) -> int:
    f = trace.graph
    if rounding_mode is None:
        return f.add("divide", trace.value(a, integer=False), trace.value(b, integer=False))
    if _integral(trace, node):
        if b == 0:
            raise ValueError(_BY_ZERO)
        operation = "int_floor_divide" if rounding_mode == "floor" else "int_truncate_divide"
        return f.add(operation, trace.value(a, integer=True), trace.value(b, integer=True))
    return f.add(rounding_mode, f.add("divide", trace.value(a, integer=False), trace.value(b, integer=False)))


def _power(trace: Any, node: fx.Node, a: Any, b: Any) -> int:
    f = trace.graph
    if _integral(trace, node):
        if not isinstance(b, int) or not 0 <= b <= 16:
            raise NotImplementedError("score_mod: got a power of integers; needs floating operands")
        base, result = trace.value(a, integer=True), f.integer(1)
        for _ in range(b):
            result = f.add("int_multiply", result, base)
        return result
    base = trace.value(a, integer=False)
    if b == 0.5:
        return f.add("sqrt", base)
    if isinstance(b, (int, float)) and b in (1, 2, 3):
        result = base
        for _ in range(int(b) - 1):
            result = f.add("multiply", result, base)
        return result
    return f.add("power", base, trace.value(b, integer=False))


def _absolute(trace: Any, node: fx.Node, a: Any) -> int:
    f, integer = trace.graph, _integral(trace, node)
    value = trace.value(a, integer)
    return f.absolute(value) if integer else f.add("absolute", value)


def _negative(trace: Any, node: fx.Node, a: Any) -> int:
    f, integer = trace.graph, _integral(trace, node)
    value = trace.value(a, integer)
    return f.add("int_subtract", f.integer(0), value) if integer else f.negative(value)


def _sign(trace: Any, node: fx.Node, a: Any) -> int:
    f = trace.graph
    value = f.add("sign", trace.value(a, integer=False))
    return f.add("to_int", value) if _integral(trace, node) else value


def _rounded(operation: str) -> _Rule:
    def rule(trace: Any, node: fx.Node, a: Any, *, decimals: int = 0) -> int:
        if decimals:
            raise NotImplementedError(f"score_mod: got round with decimals = {decimals}; needs 0")
        integer = _integral(trace, node)
        value = trace.value(a, integer)
        return value if integer else trace.graph.add(operation, value)

    return rule


def _relu(trace: Any, node: fx.Node, a: Any) -> int:
    f, integer = trace.graph, _integral(trace, node)
    value = trace.value(a, integer)
    if integer:
        return f.add("int_maximum", value, f.integer(0))
    return f.add("select", f.add("less_equal", value, f.number(0.0)), f.number(0.0), value)


def _cast(trace: Any, node: fx.Node, a: Any, *_: Any, **__: Any) -> Any:
    dtype = node.meta["val"].dtype
    lowered = trace.lowered[a] if isinstance(a, fx.Node) else None
    if isinstance(lowered, Table) and (dtype == a.meta["val"].dtype) and lowered.left():
        return lowered
    if dtype == torch.bool:
        return _truth(trace, a)
    return trace.value(a, integer=not dtype.is_floating_point)


def _same_value(trace: Any, node: fx.Node, a: Any, *_: Any, **__: Any) -> Any:
    lowered = trace.lowered[a]
    if isinstance(lowered, Table) and lowered.left() and math.prod(node.meta["val"].shape) != 1:
        raise NotImplementedError(
            f"score_mod: got {node.target} of a captured tensor that is indexed in part; needs an index for each "
            "dimension"
        )
    return lowered


def _detach(trace: Any, node: fx.Node, a: Any) -> Any:
    if trace.may_have_gradient(a):
        raise NotImplementedError(f"score_mod: got the operation detach; needs {ALL_GRADIENTS}")
    return _same_value(trace, node, a)


def _full(trace: Any, node: fx.Node, *args: Any, **_: Any) -> int:
    numbers = [a for a in args if isinstance(a, (bool, int, float))]
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]  # an OpOverload
    fixed = 1 if "ones" in name else 0 if "zeros" in name else None
    value = fixed if fixed is not None else numbers[-1] if numbers else 0
    integer = _integral(trace, node) and node.meta["val"].dtype != torch.bool
    return trace.value(value, integer)


def _index(trace: Any, node: fx.Node, table: Any, indices: Sequence[Any]) -> Table:
    lowered = trace.lowered[table]
    if not isinstance(lowered, Table):
        raise NotImplementedError("score_mod: got an index of a computed value; needs captured tensors to be indexed")
    places = {}
    for k, place in enumerate(indices):
        if place is not None:
            if place.meta["val"].dtype == torch.bool:
                raise NotImplementedError("score_mod: got a boolean index; needs integers, or torch.where")
            places[k] = trace.value(place, integer=True)
    return lowered.at(places)


def _select_place(trace: Any, node: fx.Node, table: Any, dim: int, index: Any) -> Any:
    lowered = trace.lowered[table]
    if not isinstance(lowered, Table):
        raise NotImplementedError("score_mod: got an index of a computed value; needs captured tensors to be indexed")
    return lowered.at({dim % len(lowered.left()): trace.value(index, integer=True)})


_LN2, _LN10 = math.log(2.0), math.log(10.0)
RULES: dict[str, _Rule] = {
    "add": _binary("add"),
    "sub": _binary("subtract"),
    "rsub": _reversed(_binary("subtract")),
    "mul": _binary("multiply"),
    "div": _divide,
    "true_divide": _divide,
    "floor_divide": lambda trace, node, a, b: _divide(trace, node, a, b, rounding_mode="floor"),
    "remainder": _binary("remainder"),
    "fmod": _binary("fmod"),
    "pow": _power,
    "minimum": _binary("minimum"),
    "maximum": _binary("maximum"),
    "clamp": _clamp,
    "clamp_min": lambda trace, node, a, low: _clamp(trace, node, a, low),
    "clamp_max": lambda trace, node, a, high: _clamp(trace, node, a, None, high),
    "relu": _relu,
    "abs": _absolute,
    "neg": _negative,
    "sign": _sign,
    "sgn": _sign,
    "floor": _rounded("floor"),
    "ceil": _rounded("ceil"),
    "trunc": _rounded("trunc"),
    "fix": _rounded("trunc"),
    "round": _rounded("round"),
    "reciprocal": _of_number(lambda f, a: f.add("divide", f.number(1.0), a)),
    "exp": _unary("exp"),
    "exp2": _of_number(lambda f, a: f.add("exp", f.add("multiply", a, f.number(_LN2)))),
    "expm1": _unary("expm1"),
    "log": _unary("log"),
    "log2": _of_number(lambda f, a: f.add("multiply", f.add("log", a), f.number(1 / _LN2))),
    "log10": _of_number(lambda f, a: f.add("multiply", f.add("log", a), f.number(1 / _LN10))),
    "log1p": _unary("log1p"),
    "sqrt": _unary("sqrt"),
    "rsqrt": _of_number(lambda f, a: f.add("divide", f.number(1.0), f.add("sqrt", a))),
    "tanh": _unary("tanh"),
    "sigmoid": _unary("sigmoid"),
    "erf": _unary("erf"),
    "erfc": _of_number(lambda f, a: f.add("subtract", f.number(1.0), f.add("erf", a))),
    "sin": _unary("sin"),
    "cos": _unary("cos"),
    "tan": _of_number(lambda f, a: f.add("divide", f.add("sin", a), f.add("cos", a))),
    "lt": _compare("less"),
    "gt": _compare("less", swaps=True),
    "le": _compare("less_equal"),
    "ge": _compare("less_equal", swaps=True),
    "eq": _compare("equal"),
    "ne": _compare("equal", negates=True),
    "isnan": _of_number(lambda f, a: f.add("subtract", f.number(1.0), f.add("equal", a, a))),
    "isinf": _of_number(lambda f, a: f.add("equal", f.add("absolute", a), f.number(math.inf))),
    "isposinf": _of_number(lambda f, a: f.add("equal", a, f.number(math.inf))),
    "isneginf": _of_number(lambda f, a: f.add("equal", a, f.number(-math.inf))),
    "logical_and": _logic(lambda f, a, b: f.add("multiply", a, b)),
    "logical_or": _logic(lambda f, a, b: f.add("maximum", a, b)),
    "logical_xor": _logic(_differ),
    "logical_not": _not(bits=False),
    "bitwise_and": _logic(lambda f, a, b: f.add("multiply", a, b), "int_and"),
    "bitwise_or": _logic(lambda f, a, b: f.add("maximum", a, b), "int_or"),
    "bitwise_xor": _logic(_differ, "int_xor"),
    "bitwise_not": _not(bits=True),
    "bitwise_left_shift": _logic(_differ, "int_shift_left"),
    "bitwise_right_shift": _logic(_differ, "int_shift_right"),
    "__lshift__": _logic(_differ, "int_shift_left"),
    "__rshift__": _logic(_differ, "int_shift_right"),
    "__and__": _logic(lambda f, a, b: f.add("multiply", a, b), "int_and"),
    "__or__": _logic(lambda f, a, b: f.add("maximum", a, b), "int_or"),
    "__xor__": _logic(_differ, "int_xor"),
    "where": _select,
    "masked_fill": lambda trace, node, a, mask, value: _select(trace, node, mask, value, a),
    "_to_copy": _cast,
    "to": _cast,
    "convert_element_type": _cast,
    "clone": _same_value,
    "alias": _same_value,
    "detach": _detach,
    "lift_fresh_copy": _same_value,
    "lift_fresh": _same_value,
    "view": _same_value,
    "_unsafe_view": _same_value,
    "reshape": _same_value,
    "squeeze": _same_value,
    "unsqueeze": _same_value,
    "expand": _same_value,
    "scalar_tensor": _full,
    "full": _full,
    "full_like": _full,
    "zeros_like": _full,
    "ones_like": _full,
    "new_full": _full,
    "new_ones": _full,
    "new_zeros": _full,
    "zeros": _full,
    "ones": _full,
    "index": _index,
    "select": _select_place,
}
