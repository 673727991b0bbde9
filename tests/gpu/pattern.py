"""Which elements of a result are wrong: the first one, and what they have in common.

The pattern tells one kind of mistake from another. A wrong swizzle is wrong in some columns of every 8 rows, a wrong
phase of a barrier in a whole tile, a wrong fragment in the rows or columns of one thread.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

WARPGROUP, WARP, PANEL = 64, 16, 64  # rows of a warpgroup and of a warp, columns of a panel in shared memory
SHOWN = 12  # groups, those with the most wrong elements


def fill(dtype: torch.dtype) -> Tensor:
    """The number that torch fills new memory with if algorithms are to be deterministic."""
    return torch.tensor(math.nan, dtype=dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def counts(groups: Tensor) -> dict[str, int]:
    """The groups with the most elements, and how many they have. Keys are text, as in JSON."""
    numbers, sizes = groups.unique(return_counts=True)
    order = sizes.argsort(descending=True, stable=True)[:SHOWN]
    return {str(int(numbers[k])): int(sizes[k]) for k in order}


def compared(
    found: Tensor, wanted: Tensor, limit: float, *, columns: bool = True, first_rows: Tensor | None = None
) -> dict[str, Any]:
    """Compares results of shape (..., rows, columns), or (..., rows) if not `columns`. An element is wrong if it is
    further from `wanted` than limit * max |wanted|, or infinite or NaN in only one of the two. `first_rows`: of each
    row, the first row of its sequence, from where tiles count; 0 if None. The facts have "wrong", the number of these
    elements; if that is not 0, also where they are, "nan", how many are NaN, and "unwritten", how many of these have
    the bits of `fill`."""
    found, wanted = found.detach(), wanted.detach().double()
    scale = wanted[wanted.isfinite()].abs().max() if wanted.isfinite().any() else wanted.new_zeros(())
    off = (found.double() - wanted).abs() / scale.clamp_min(1e-30)
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    off = torch.where(same, 0.0, off).nan_to_num(math.inf, math.inf)
    is_wrong = off > limit
    facts: dict[str, Any] = {"error": float(off.max()) if off.numel() else 0.0, "wrong": int(is_wrong.sum())}
    if not facts["wrong"]:
        return facts
    wrong = is_wrong.nonzero()
    first = tuple(wrong[0].tolist())
    nan = found.isnan() & is_wrong
    facts |= {
        "of": off.numel(),
        "nan": int(nan.sum()),
        "unwritten": int((nan & (bits(found) == bits(fill(found.dtype)).to(found.device))).sum()),
        "first": first,
        "found": float(found[first]),
        "wanted": float(wanted[first]),
    }
    row = wrong[:, -2] if columns else wrong[:, -1]
    head = torch.zeros_like(row)  # of all batch entries
    for k, size in enumerate(found.shape[: -1 - columns]):
        head = head * size + wrong[:, k]
    facts["head"] = counts(head)
    if first_rows is not None:
        facts["first row of the sequence"] = counts(first_rows[row])
        row = row - first_rows[row]
    facts |= {
        "row / 64": counts(row // WARPGROUP),
        "row % 64 / 16": counts(row % WARPGROUP // WARP),
        "row % 8": counts(row % 8),
    }
    if columns:
        column = wrong[:, -1]
        facts |= {"column / 64": counts(column // PANEL), "column % 8": counts(column % 8)}
    return facts


def said(name: str, facts: dict[str, Any]) -> str:
    """A line for a reader."""
    if not facts["wrong"]:
        return f"{name}: right, error {facts['error']:.1e}"
    text = f"{name}: {facts['wrong']} of {facts['of']} elements wrong, error {facts['error']:.1e}"
    if facts["nan"]:
        text += f", {facts['nan']} NaN ({facts['unwritten']} with the bits of unwritten memory)"
    text += f"; the first at {facts['first']}: {facts['found']:.6g}, not {facts['wanted']:.6g}"
    for group, sizes in facts.items():
        if isinstance(sizes, dict):
            text += f"; {group}: {' '.join(f'{number}({size})' for number, size in sizes.items())}"
    return text
