"""Which rank needs which keys, and the route of each chunk of keys round the ring.

Every rank holds keys in chunks, each a run of positions, and also rows in chunks. A rank needs a chunk of keys if at
least one of its rows may attend to at least one of these keys by position (causal mask, window). The chunk travels from
its owner to the ranks that need it, in the order of the ring; each passes it on to the next. In step s, rank r computes
with chunks of rank (r - s) mod n. Ranks that do not need a chunk are skipped, so only chunks that are used are sent.
The gradients of a chunk's keys and values are summed along the same route, and its last rank returns them to the owner.

Ring Attention: Liu, Zaharia and Abbeel, 2023. If every rank needs every chunk this is their ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .placement import Run

UNBOUNDED = 2**60


@dataclass(frozen=True)
class Chunk:
    """A run of positions that a rank holds; it begins at index `at` of its local tensor."""

    number: int  # among all chunks of all ranks
    owner: int
    run: Run
    at: int

    @property
    def length(self) -> int:
        return self.run.length


@dataclass(frozen=True)
class Reach:
    """Row i may attend to key j by position if -left <= j - (i + diagonal) <= right."""

    diagonal: int = 0
    left: int = UNBOUNDED
    right: int = UNBOUNDED

    def meets(self, rows: Run, keys: Run) -> bool:
        """Whether at least one row may attend to at least one key."""
        first, last = rows.begin + self.diagonal - self.left, rows.end - 1 + self.diagonal + self.right
        return rows.length > 0 and keys.length > 0 and keys.begin <= last and first < keys.end


def chunks_of(runs: Sequence[Sequence[Run]]) -> list[list[Chunk]]:
    """The chunks of each rank, except empty ones."""
    result: list[list[Chunk]] = []
    number = 0
    for owner, held in enumerate(runs):
        chunks, at = [], 0
        for run in held:
            if run.length:
                chunks.append(Chunk(number, owner, run, at))
                number += 1
            at += run.length
        result.append(chunks)
    return result


class Schedule:
    """Rows and keys of all ranks, and which rank needs which chunk in which step. All ranks have one schedule."""

    def __init__(self, rows: Sequence[Sequence[Run]], keys: Sequence[Sequence[Run]], reach: Reach) -> None:
        self.rows, self.keys, self.reach = chunks_of(rows), chunks_of(keys), reach
        self.ranks = len(self.keys)
        self.count = sum(len(chunks) for chunks in self.keys)  # of chunks of keys
        self._route: dict[int, tuple[int, ...]] = {
            chunk.number: tuple(rank for s in range(self.ranks) if self.pairs(rank := (owner + s) % self.ranks, chunk))
            for owner, chunks in enumerate(self.keys)
            for chunk in chunks
        }

    def pairs(self, rank: int, keys: Chunk) -> list[Chunk]:
        """The rank's chunks of rows with a row that may attend to one of `keys`."""
        return [rows for rows in self.rows[rank] if self.reach.meets(rows.run, keys.run)]

    def step(self, rank: int, step: int) -> list[Chunk]:
        """The chunks of keys that the rank computes with in a step."""
        return [chunk for chunk in self.keys[(rank - step) % self.ranks] if rank in self._route[chunk.number]]

    def route(self, chunk: Chunk) -> tuple[int, ...]:
        """The ranks that need the chunk, in the order in which they get it. If the owner is among them, it is first."""
        return self._route[chunk.number]

    def before(self, rank: int, chunk: Chunk) -> int | None:
        """The rank from which a rank on the route gets the chunk; None for its owner."""
        if rank == chunk.owner:
            return None
        place = self.route(chunk).index(rank)
        return self.route(chunk)[place - 1] if place else chunk.owner

    def after(self, rank: int, chunk: Chunk) -> int | None:
        """The rank to which the owner, or a rank on the route, sends the chunk; None at the end of the route."""
        route = self.route(chunk)
        place = route.index(rank) + 1 if rank in route else 0
        return route[place] if place < len(route) else None
