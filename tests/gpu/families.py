"""Families of calls: those that run the same compiled kernels. If one of a family hangs or faults, later programs leave
out the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpu import lines

UNSAFE = ("error", "crash", "hang")  # results after which a family is left out
CLUSTER_ROWS = 128  # of a query tile of the kernels in clusters
FEW_ROWS, MANY_KEYS = 64, 1024  # csrc/cuda/sm90/select.cu: from here on, keys are split


@dataclass(frozen=True)
class Family:
    """An empty field matches every family."""

    kernel: str = ""  # as in explain()
    direction: str = ""  # forward, backward
    dtype: str = ""
    width: str = ""
    kind: str = ""  # plain, cluster, general, split, packed, pages, quantised

    def __str__(self) -> str:
        return " ".join(value or "any" for value in vars(self).values())

    @staticmethod
    def of(text: str) -> Family:
        return Family(*("" if word == "any" else word for word in text.split()))

    def meets(self, other: Family) -> bool:
        """Whether some call may belong to both."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return all(a == b or not a or not b for a, b in pairs)


def width(head_dim: int, value_dim: int) -> str:
    """The columns that kernels are compiled for."""
    if 128 < head_dim <= 192 and value_dim <= 128:
        return "192/128"
    return next((str(columns) for columns in (64, 128, 256) if max(head_dim, value_dim) <= columns), "wide")


def dense_kind(rows: int, keys: int, dims: tuple[int, int], *, masks_positions: bool, general: bool) -> str:
    """`general`: scores need more than the product and a range of keys."""
    if rows < FEW_ROWS and keys >= MANY_KEYS:
        return "split"
    if general:
        return "general"
    tiles = -(-rows // CLUSTER_ROWS)
    return "cluster" if max(dims) > 64 and tiles % 2 == 0 and not masks_positions else "plain"


def of_direction(kind: str, direction: str) -> str:
    """Only forwards run in clusters or split their keys."""
    return "plain" if direction == "backward" and kind in ("cluster", "split") else kind


def unsafe(results: Path) -> set[Family]:
    """The families that a line of the file says hung or faulted."""
    found = (line["family"] for line in lines.read(results) if line.get("result") in UNSAFE and "family" in line)
    return {Family.of(text) for text in found}


def reason(call: Family, left_out: Iterable[Family]) -> str | None:
    """Why a call of this family is left out; None if it is not."""
    return next((f"{family} hung or faulted" for family in left_out if family.meets(call)), None)
