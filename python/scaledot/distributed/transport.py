"""What ranks send each other, by torch.distributed alone, and how much: point to point, all to all, and a few numbers.

Everything goes as bytes, so that a backend need not know a dtype. On gloo the transfers run on threads of its own while
this one computes; on NCCL, on its streams.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Traffic", "measure"]

Group = Any  # a ProcessGroup; what DeviceMesh.get_group returns


@dataclass
class Traffic:
    """What this rank sent, in bytes by kind, and where its time went, in seconds.

    Kinds: "keys_values" and "gradients" (ring), "exchange" (all to all), "agreement" (the numbers that ranks compare).
    """

    sent: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    waiting: float = 0.0  # for keys, values and gradients of another rank, with nothing to compute
    agreeing: float = 0.0  # for the other ranks' arguments, and so for the last rank to come
    computing: float = 0.0  # in attention kernels

    def count(self, kind: str, size: int) -> None:
        self.sent[kind] += size
        self.messages[kind] += 1


_measuring: list[Traffic] = []


@contextlib.contextmanager
def measure() -> Iterator[Traffic]:
    """Counts what this rank sends in scaledot.distributed while the block runs, backward passes in it included."""
    traffic = Traffic()
    _measuring.append(traffic)
    try:
        yield traffic
    finally:
        _measuring.remove(traffic)


def count(kind: str, size: int) -> None:
    for traffic in _measuring:
        traffic.count(kind, size)


@contextlib.contextmanager
def timed(where: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        for traffic in _measuring:
            setattr(traffic, where, getattr(traffic, where) + time.perf_counter() - start)


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """What a backend says of a rank that is gone or late, with what was waited for in front."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"scaledot.distributed: {what} failed; has a rank of the group ended? ({error})") from error


# ------------------------------------------------------------------------------------------------ point to point
@dataclass
class Message:
    """One tensor of bytes on its way to or from rank `peer` of the group. A tag is used once in a pass."""

    data: Tensor
    peer: int
    tag: int


def post(sends: Sequence[Message], receives: Sequence[Message], group: Group, kind: str) -> list[Any]:
    """Starts the transfers and returns what to wait() for. Data of sends must not change before that."""
    operations = [dist.P2POp(dist.isend, m.data, group=group, tag=m.tag, group_peer=m.peer) for m in sends]
    operations += [dist.P2POp(dist.irecv, m.data, group=group, tag=m.tag, group_peer=m.peer) for m in receives]
    if not operations:
        return []
    for message in sends:
        count(kind, message.data.numel())
    with explained("sending to another rank"):
        return list(dist.batch_isend_irecv(operations))


def wait(works: Sequence[Any]) -> None:
    with timed("waiting"), explained("waiting for another rank"):
        for work in works:
            work.wait()


class Outbox:
    """What a pass over the ring has sent and not yet waited for; keeps the data until it is.

    So that a rank keeps two steps' data and not the whole sequence, what goes to the next rank is waited for two steps
    later. That rank asks for it one step after it was sent here, and a rank in the earliest step of all never waits for
    it; so nobody waits for ever. What goes further round, to a rank that asks for it much later, is waited for at the
    end.
    """

    def __init__(self, group: Group, kind: str) -> None:
        self.group, self.kind = group, kind
        self.soon: list[tuple[int, Tensor, list[Any]]] = []
        self.late: list[tuple[Tensor, list[Any]]] = []

    def send(self, message: Message, step: int, soon: bool) -> None:
        works = post([message], [], self.group, self.kind)
        if soon:
            self.soon.append((step, message.data, works))
        else:
            self.late.append((message.data, works))

    def settle(self, step: int) -> None:
        """Forgets what was sent to the next rank two steps ago."""
        for sent, _, works in self.soon:
            if sent <= step - 2:
                wait(works)
        self.soon = [entry for entry in self.soon if entry[0] > step - 2]

    def close(self) -> None:
        for works in (*(entry[2] for entry in self.soon), *(entry[1] for entry in self.late)):
            wait(works)
        self.soon, self.late = [], []


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors' numbers, one tensor after the other, as bytes."""
    return torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in tensors])


def size_in_bytes(shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes)


def unpack(data: Tensor, shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
    """Views of `data`; dtypes must not become wider from one to the next, so that all are aligned."""
    tensors, at = [], 0
    for shape, dtype in shapes:
        size = size_in_bytes([(shape, dtype)])
        tensors.append(data[at : at + size].view(dtype).view(*shape))
        at += size
    return tensors


# ---------------------------------------------------------------------------------------------------- all to all
def all_to_all(pieces: Sequence[Tensor], sizes: Sequence[int], group: Group) -> list[Tensor]:
    """Sends pieces[r], bytes, to rank r, and returns what rank r sent here, which is sizes[r] long."""
    rank = dist.get_rank(group)
    for peer, piece in enumerate(pieces):
        if peer != rank:
            count("exchange", piece.numel())
    received = pieces[0].new_empty(sum(sizes))
    with timed("waiting"), explained("an all-to-all"):
        dist.all_to_all_single(
            received, torch.cat(list(pieces)), list(sizes), [piece.numel() for piece in pieces], group=group
        )
    return list(received.split(list(sizes)))


# --------------------------------------------------------------------------------------------------- to everyone
def gather_numbers(numbers: Sequence[int], groups: Sequence[Group], device: torch.device) -> Tensor:
    """(..., len(numbers)) int64, on the CPU: the numbers of all ranks. One leading dimension for each group, the last
    group's first: after each group, its ranks know what all those know that they asked before."""
    known = torch.tensor(numbers, dtype=torch.int64, device=device)
    for group in groups:
        ranks = dist.get_world_size(group)
        rows = [torch.empty_like(known) for _ in range(ranks)]
        count("agreement", known.numel() * known.element_size() * (ranks - 1))
        with timed("agreeing"), explained("asking the other ranks for their arguments"):
            dist.all_gather(rows, known, group=group)
        known = torch.stack(rows)
    return known.cpu()
