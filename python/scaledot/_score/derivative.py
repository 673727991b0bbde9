"""The derivative of a score function's graph: the chain rule, with a rule for each operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from .graph import Graph

__all__ = ["derivatives"]

# d operation / d operand times g, the derivative by the operation's value: (graph, node, g, operands) -> node. None: 0.
_Term = Callable[..., int]


def _same(f: Graph, n: int, g: int, *_: int) -> int:
    return g


def _times(factor: Callable[..., int]) -> _Term:
    return lambda f, n, g, *operands: f.add("multiply", g, factor(f, n, *operands))


def _share(wins: tuple[int, int]) -> _Term:
    """A rule of minimum or maximum: operand wins[0] is less than operand wins[1]. Equal ones share the derivative."""

    def term(f: Graph, n: int, g: int, *operands: int) -> int:
        a, b = operands[wins[0]], operands[wins[1]]
        half = f.add("multiply", g, f.number(0.5))
        return f.add("select", f.add("less", a, b), g, f.add("select", f.add("equal", a, b), half, f.number(0.0)))

    return term


def _power_base(f: Graph, n: int, g: int, a: int, b: int) -> int:
    slope = f.add("multiply", b, f.add("power", a, f.add("subtract", b, f.number(1.0))))
    return f.add("select", f.add("equal", b, f.number(0.0)), f.number(0.0), f.add("multiply", g, slope))


def _power_exponent(f: Graph, n: int, g: int, a: int, b: int) -> int:
    zero = f.number(0.0)
    flat = f.add("multiply", f.add("equal", a, zero), f.add("less_equal", zero, b))
    return f.add("select", flat, zero, f.add("multiply", g, f.add("multiply", n, f.add("log", a))))


def _square(f: Graph, node: int) -> int:
    return f.add("multiply", node, node)


def _quotient(rounding: str) -> _Term:
    return lambda f, n, g, a, b: f.negative(f.add("multiply", g, f.add(rounding, f.add("divide", a, b))))


_DERIVATIVES: dict[str, tuple[_Term | None, ...]] = {
    "add": (_same, _same),
    "subtract": (_same, lambda f, n, g, a, b: f.negative(g)),
    "multiply": (_times(lambda f, n, a, b: b), _times(lambda f, n, a, b: a)),
    "divide": (
        lambda f, n, g, a, b: f.add("divide", g, b),
        lambda f, n, g, a, b: f.negative(f.add("divide", f.add("multiply", g, n), b)),
    ),
    "minimum": (_share((0, 1)), _share((1, 0))),
    "maximum": (_share((1, 0)), _share((0, 1))),
    "power": (_power_base, _power_exponent),
    "fmod": (_same, _quotient("trunc")),
    "remainder": (_same, _quotient("floor")),
    "absolute": (_times(lambda f, n, a: f.add("sign", a)),),
    "exp": (_times(lambda f, n, a: n),),
    "log": (lambda f, n, g, a: f.add("divide", g, a),),
    "log1p": (lambda f, n, g, a: f.add("divide", g, f.add("add", a, f.number(1.0))),),
    "expm1": (_times(lambda f, n, a: f.add("add", n, f.number(1.0))),),
    "sqrt": (lambda f, n, g, a: f.add("divide", g, f.add("multiply", n, f.number(2.0))),),
    "tanh": (_times(lambda f, n, a: f.one_minus(_square(f, n))),),
    "sigmoid": (_times(lambda f, n, a: f.add("multiply", n, f.one_minus(n))),),
    "erf": (
        _times(
            lambda f, n, a: f.add(
                "multiply", f.add("exp", f.negative(_square(f, a))), f.number(2.0 / math.sqrt(math.pi))
            )
        ),
    ),
    "sin": (_times(lambda f, n, a: f.add("cos", a)),),
    "cos": (_times(lambda f, n, a: f.negative(f.add("sin", a))),),
    "select": (
        None,
        lambda f, n, g, c, a, b: f.add("select", c, g, f.number(0.0)),
        lambda f, n, g, c, a, b: f.add("select", c, f.number(0.0), g),
    ),
}


def derivatives(graph: Graph, result: int, of: Iterable[int]) -> dict[int, int]:
    """d result / d node for each node in `of` that the result depends on, by the chain rule, backwards."""
    active = set(of)
    for k, node in enumerate(graph.nodes[: result + 1]):
        if not graph.is_integer(k) and any(operand in active for operand in node.operands):
            active.add(k)
    found = {result: graph.number(1.0)}
    for k in range(result, -1, -1):
        node = graph.nodes[k]
        if k not in found or k not in active or node.operation not in _DERIVATIVES:
            continue
        for operand, term in zip(node.operands, _DERIVATIVES[node.operation], strict=True):
            if operand in active and term is not None:
                more = term(graph, k, found[k], *node.operands)
                found[operand] = graph.add("add", found[operand], more) if operand in found else more
    return {k: found[k] for k in of if k in found}
