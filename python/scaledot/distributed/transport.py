"""Messages between ranks by torch.distributed, and how much they carry: point to point, all to all, and a few numbers.

All data is sent as bytes, so a backend need not support its dtype. Transfers run on threads of gloo, or on streams of
NCCL, while this thread computes.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._keywords import check_constructor, check_keywords

__all__ = ["Traffic", "measure"]

Group = Any  # a ProcessGroup; what DeviceMesh.get_group returns


@check_constructor
@dataclass
class Traffic:
    """The bytes that this rank sent, by kind, and the seconds that it spent, by activity.

    Kinds: "keys_values" and "gradients" (ring), "exchange" (all to all), "agreement" (the numbers that ranks compare).
    """

    sent: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    waiting: float = 0.0  # for keys, values and gradients of another rank, with nothing to compute
    agreeing: float = 0.0  # for the arguments of the other ranks, so until the last rank makes the call
    computing: float = 0.0  # in attention kernels

    def count(self, kind: str, size: int) -> None:
        self.sent[kind] += size
        self.messages[kind] += 1


_measuring: list[Traffic] = []


@check_keywords
@contextlib.contextmanager
def measure() -> Iterator[Traffic]:
    """Counts what this rank sends in scaledot.distributed while the block runs, including backward passes in it.

    Example:
        >>> with scaledot.distributed.measure() as traffic:
        ...     output = scaledot.distributed.context_parallel_attention(query, key, value, mesh)
        >>> traffic.sent["keys_values"], traffic.waiting
    """
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
    """Adds what was awaited to the error that a backend raises for a rank that ended, is late or cannot be reached."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"scaledot.distributed: {what} failed; has a rank of the group ended, or lost its connection? ({error})"
        ) from error


# ------------------------------------------------------------------------------------------------ point to point
@dataclass
class Message:
    """One tensor of bytes, sent to or received from rank `peer` of the group. A tag is used once in a pass."""

    data: Tensor
    peer: int
    tag: int


def post(sends: Sequence[Message], receives: Sequence[Message], group: Group, kind: str) -> list[Any]:
    """Starts the transfers, and returns the works for wait(). Data to send must not change before that."""
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
    """The sends of a pass over the ring that are not yet waited for, with their data.

    A send to the next rank is waited for two steps later, so a rank keeps the data of two steps and not of the whole
    sequence. There is no deadlock: the next rank posts its receive one step after the send, and a rank in the earliest
    step of all never waits for a send. A send to a rank further on, which receives it much later, is waited for at the
    end.
    """

    def __init__(self, group: Group, kind: str) -> None:
        self.group, self.kind = group, kind
        self.sent: list[tuple[float, Tensor, list[Any]]] = []  # the step; infinity for what is waited for at the end

    def send(self, message: Message, step: int, soon: bool) -> None:
        works = post([message], [], self.group, self.kind)
        self.sent.append((step if soon else math.inf, message.data, works))

    def settle(self, step: float) -> None:
        """Waits for what was sent to the next rank two steps ago, and drops the data."""
        for sent, _, works in self.sent:
            if sent <= step - 2:
                wait(works)
        self.sent = [entry for entry in self.sent if entry[0] > step - 2]

    def close(self) -> None:
        self.settle(math.inf)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of the tensors, one tensor after the other, as bytes."""
    return torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in tensors])


def size_in_bytes(shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes)


def unpack(data: Tensor, shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
    """The tensors, as views of `data`. To be aligned, dtypes must not become wider from one to the next."""
    tensors, at = [], 0
    for shape, dtype in shapes:
        size = size_in_bytes([(shape, dtype)])
        tensors.append(data[at : at + size].view(dtype).view(*shape))
        at += size
    return tensors


# ---------------------------------------------------------------------------------------------------- all to all
def all_to_all(pieces: Sequence[Tensor], sizes: Sequence[int], group: Group) -> list[Tensor]:
    """Sends the bytes pieces[r] to rank r, and returns what each rank r sent here, sizes[r] bytes."""
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
    """(..., len(numbers)) int64, on the CPU: the numbers of all ranks.

    There is one leading dimension for each group, that of the last group first: each group exchanges what its ranks
    learnt from the groups before.
    """
    known = torch.tensor(numbers, dtype=torch.int64, device=device)
    for group in groups:
        ranks = dist.get_world_size(group)
        rows = [torch.empty_like(known) for _ in range(ranks)]
        count("agreement", known.numel() * known.element_size() * (ranks - 1))
        with timed("agreeing"), explained("asking the other ranks for their arguments"):
            dist.all_gather(rows, known, group=group)
        known = torch.stack(rows)
    return known.cpu()
