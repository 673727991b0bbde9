"""What score functions capture, as tensors that may have a gradient."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

_PREFIX = "captured_"  # before the name of a variable in a closure


def captured(score_mod: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of this dtype in the function's closure, by names that are no argument of attention."""
    found = {name: cell.cell_contents for name, cell in _closure(score_mod)}
    return {f"{_PREFIX}{name}": t for name, t in found.items() if isinstance(t, Tensor) and t.dtype == dtype}


def with_captured(given: dict[str, Any], leaves: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments of a call, with a score function that has these tensors in its closure."""
    changed = {name.removeprefix(_PREFIX): t for name, t in leaves.items() if name.startswith(_PREFIX)}
    arguments = {**given, **{name: t for name, t in leaves.items() if not name.startswith(_PREFIX)}}
    if changed:
        f = given["score_mod"]
        cells = [types.CellType(changed.get(name, cell.cell_contents)) for name, cell in _closure(f)]
        arguments["score_mod"] = types.FunctionType(f.__code__, f.__globals__, closure=tuple(cells))
    return arguments


def _closure(score_mod: Any) -> list[tuple[str, types.CellType]]:
    names = getattr(getattr(score_mod, "__code__", None), "co_freevars", ())
    return list(zip(names, score_mod.__closure__, strict=True)) if names else []
