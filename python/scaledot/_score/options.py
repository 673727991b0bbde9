"""Score functions that options of the ops compute: softcap, alibi_slopes and relative_bias, which are faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .graph import Graph, Load

__all__ = ["OPTIONS", "as_options", "known", "known_options", "option_arguments", "usable"]

OPTIONS = ("softcap", "alibi_slopes", "relative_bias")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_MARK = "_scaledot_options"  # the attribute of a score function that has them


def known(score_mod: _Function, options: dict[str, Any]) -> _Function:
    """`score_mod`, marked as what `options` of the ops compute."""
    setattr(score_mod, _MARK, options)
    return score_mod


def known_options(score_mod: Any) -> dict[str, Any] | None:
    found: dict[str, Any] | None = getattr(score_mod, _MARK, None)
    return found


def usable(options: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options' arguments of the ops; None if these compute something else. `others`: further arguments."""
    arguments = dict(options)
    if "causal_alignment" in others and ("alibi_slopes" in options or "relative_bias" in options):
        return None  # the options count distances from its diagonal, and a function from key = row
    slopes = options.get("alibi_slopes")
    if slopes is not None and slopes.requires_grad:
        if torch.is_grad_enabled():
            return None  # the option has no gradient
        arguments["alibi_slopes"] = slopes.detach()
    return arguments


def option_arguments(
    options: Mapping[str, Any], tables: Sequence[Tensor], query: Tensor, batches: int, others: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Those of `as_options` as arguments of the ops. None: the tensors do not have the options' shapes."""
    arguments = {}
    for name, value in options.items():
        if name == "softcap":
            arguments[name] = value
            continue
        table = tables[value]
        lead = table.shape if name == "alibi_slopes" else table.shape[:-1]
        sizes = (batches, query.shape[-3] if query.dim() > 2 else 1)[2 - len(lead) :]
        ones = name == "relative_bias"
        if query.dim() > 4 or not all(a == b or (ones and a == 1) for a, b in zip(lead, sizes, strict=True)):
            return None
        arguments[name] = table
    return usable(arguments, others)


def as_options(graph: Graph, result: int, score: int) -> dict[str, Any] | None:
    """The options that compute exactly what a graph does: softcap's number, and the tables of the others.

    None: they do not.
    """
    found: dict[str, Any] = {}
    loads = {load.node: load for load in graph.loads}
    node = result
    while node != score:
        operation, operands = graph.nodes[node].operation, graph.nodes[node].operands
        if operation == "multiply":
            cap = _softcap(graph, node, score)
            return None if cap is None else {"softcap": cap, **found}
        if operation not in ("add", "subtract"):
            return None
        orders = [operands, operands[::-1]] if operation == "add" else [operands]
        sign = 1.0 if operation == "add" else -1.0
        matches = [(inner, option) for inner, term in orders if (option := _added(graph, term, sign, loads))]
        if not matches or matches[0][1][0] in found:
            return None
        node, (name, table) = matches[0]
        found[name] = table
    return found


def _softcap(graph: Graph, node: int, score: int) -> float | None:
    """c, if the node is tanh(score / c) * c."""
    tanh, cap = graph.nodes[node].operands
    c = _constant(graph, cap)
    if c is None or c <= 0 or graph.nodes[tanh].operation != "tanh":
        return None
    inner = graph.nodes[graph.nodes[tanh].operands[0]]
    return c if inner.operation == "divide" and inner.operands == (score, cap) else None


def _added(graph: Graph, term: int, sign: float, loads: Mapping[int, Load]) -> tuple[str, int] | None:
    """(option, table) if adding sign * term to a score is one of them."""
    load = loads.get(term)
    if load is not None:
        return ("relative_bias", load.table) if sign == 1 and _is_relative(graph, load) else None
    factors, waiting = [], [term]
    while waiting:
        node = waiting.pop()
        constant = _constant(graph, node)
        if constant is not None:
            sign *= constant
        elif graph.nodes[node].operation == "multiply":
            waiting += graph.nodes[node].operands
        elif graph.nodes[node].operation == "subtract" and _constant(graph, graph.nodes[node].operands[0]) == 0:
            sign = -sign
            waiting.append(graph.nodes[node].operands[1])
        else:
            factors.append(node)
    if len(factors) != 2 or sign != -1:
        return None
    slopes = [loads[node] for node in factors if node in loads]
    distances = [node for node in factors if _is_distance(graph, node)]
    if len(slopes) != 1 or len(distances) != 1 or _places(graph, slopes[0]) not in (["head"], ["batch", "head"]):
        return None
    return "alibi_slopes", slopes[0].table


def _is_relative(graph: Graph, load: Load) -> bool:
    """Whether its index is (batch, head, clamp(key - row, -M, M) + M), for 2 M + 1 entries."""
    if not 1 <= len(load.places) <= 3 or load.shape[-1] % 2 == 0:
        return False
    reach = load.shape[-1] // 2
    for place, size, wanted in zip(
        _places(graph, load)[:-1], load.shape[:-1], ("batch", "head")[3 - len(load.places) :], strict=True
    ):
        if place != wanted and not (place == "int_constant" and size == 1):
            return False
    node, ends = load.places[-1], {}
    shift: float | None = 0.0
    if graph.nodes[node].operation == "add":
        node, end = graph.nodes[node].operands
        shift = _constant(graph, end)
    if shift is None:
        return False
    for _ in range(2):
        operation = graph.nodes[node].operation
        if operation in ("maximum", "minimum"):
            node, end = graph.nodes[node].operands
            ends[operation] = _constant(graph, end)
    return ends == {"maximum": -shift, "minimum": 2 * reach - shift} and graph.linear(node) == (1, -1, reach - shift)


def _is_distance(graph: Graph, node: int) -> bool:
    """Whether it is |key - row|."""
    if graph.nodes[node].operation != "absolute":
        return False
    return graph.linear(graph.nodes[node].operands[0]) in ((1, -1, 0), (-1, 1, 0))


def _places(graph: Graph, load: Load) -> list[str]:
    """What its indices are, also those that are floating numbers."""
    found = [graph.nodes[node] for node in load.places]
    return [graph.nodes[n.operands[0]].operation if n.operation == "to_float" else n.operation for n in found]


def _constant(graph: Graph, node: int) -> float | None:
    return float(graph.nodes[node].value) if graph.nodes[node].operation == "constant" else None
