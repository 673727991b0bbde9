"""How long a step of context-parallel attention takes on a cluster, from the speed of the kernel and of the links.

A rank computes n_s scores in step s of the ring, while b_s bytes arrive for the next step:

    compute_s  = calls_s * overhead + batch * heads * n_s * seconds per score
    transfer_s = latency + b_s / bandwidth
    agreement  = (ranks - 1) * latency                               (checks.py: a few numbers to all, in a ring)
    forward    = agreement + sum_s max(compute_s, transfer_{s+1})                       (of the slowest rank in each s)
    backward   = sum_s max(compute_s, transfer_{s+1} + gradients_s) + gradients home
    all to all = (ranks - 1) * latency + bytes / bandwidth + copies, and then all positions for heads / ranks
    copies     = 2 * (bytes sent and kept) * seconds per byte copied

n_s and b_s are those of the schedule, so masks, windows and placements are included. All to all copies each tensor
twice: into messages, and out of them. The model gives each rank its own link, which carries its full bandwidth in both
directions at once. It does not include shared links or the rest of the network.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._keywords import check_constructor, check_keywords
from .placement import runs_of_ranks
from .schedule import UNBOUNDED

__all__ = ["Estimate", "Kernel", "Link", "Work", "all_to_all", "best", "both", "grids", "one", "ring"]


@check_constructor
@dataclass(frozen=True)
class Link:
    """A rank's connection: latency in seconds, bandwidth in bytes a second, and seconds to copy a byte on the rank."""

    latency: float
    bandwidth: float
    copying: float = 0.0

    @check_keywords
    def seconds(self, size: Tensor) -> Tensor:
        return torch.where(size > 0, self.latency + size / self.bandwidth, torch.zeros_like(size))


@check_constructor
@dataclass(frozen=True)
class Kernel:
    """Seconds for a score of one head, forward and backward, and seconds for a call itself."""

    forward: float
    backward: float
    overhead: float


def kernel_of(flops: float, head_dim: int, value_dim: int, overhead: float = 2e-5) -> Kernel:
    """A kernel of `flops` operations a second: 2 (D + Dv) a score forward, and 2.5 times that backward."""
    forward = 2 * (head_dim + value_dim) / flops
    return Kernel(forward, 2.5 * forward, overhead)


@check_constructor
@dataclass(frozen=True)
class Work:
    """One attention: its sizes, the bytes of an element, and what is masked by position."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    value_dim: int
    itemsize: int = 2
    is_causal: bool = True
    left: int = UNBOUNDED


@check_constructor
@dataclass(frozen=True)
class Estimate:
    """Seconds for one forward and backward, the part of them spent computing, and the bytes that a rank sends."""

    seconds: float
    computing: float
    sent: float
    forward: float
    name: str = ""


def _steps(work: Work, ranks: int, placement: str) -> tuple[Tensor, Tensor, Tensor]:
    """Three of (steps, ranks): scores of a head, calls, and positions that arrive for the step."""
    return _count(work.length, ranks, placement, work.is_causal, work.left)


@functools.lru_cache(maxsize=256)
def _count(length: int, ranks: int, placement: str, is_causal: bool, left: int) -> tuple[Tensor, Tensor, Tensor]:
    runs = torch.tensor([[tuple(run) for run in held] for held in runs_of_ranks(length, ranks, placement)])
    begin, end = runs[..., 0], runs[..., 1]  # (ranks, chunks)
    far = 4 * length + 1  # no limit in effect, and nothing overflows
    steps = []
    rows_begin, rows_end = begin[:, :, None], end[:, :, None]
    for step in range(ranks):
        keys_begin, keys_end = (t.roll(step, 0)[:, None, :] for t in (begin, end))
        width = keys_end - keys_begin

        def below(first: Tensor, width: Tensor = width) -> Tensor:
            # The sum over rows i of min(max(i + first, 0), width): a line from row `low` to `high`, then `width`.
            low = torch.maximum(rows_begin, -first)
            high = torch.minimum(rows_end, width - first)
            line = torch.where(high > low, (low + high - 1 + 2 * first) * (high - low) // 2, 0)
            return line + (rows_end - torch.maximum(width - first, rows_begin)).clamp(min=0) * width

        scores = below((0 if is_causal else far) + 1 - keys_begin) - below(-min(left, far) - keys_begin)
        needed = (scores > 0).any(1)
        arriving = torch.where(needed, width[:, 0], 0).sum(1) if step else torch.zeros(ranks, dtype=torch.int64)
        steps.append((scores.sum((1, 2)).double(), (scores > 0).sum((1, 2)).double(), arriving.double()))
    counted = [torch.stack([step[k] for step in steps]) for k in range(3)]
    return counted[0], counted[1], counted[2]


def _wide(work: Work) -> int:
    return max(work.itemsize, 4)


@check_keywords
def ring(work: Work, ranks: int, kernel: Kernel, link: Link, placement: str = "zigzag", name: str = "ring") -> Estimate:
    """Keys and values travel round the ranks."""
    scores, calls, arriving = _steps(work, ranks, placement)
    heads = work.batch * work.heads
    position = work.batch * work.kv_heads * (work.head_dim + work.value_dim)
    transfer = link.seconds(arriving * position * work.itemsize).amax(1)
    gradients = link.seconds(arriving * position * _wide(work)).amax(1)
    following = torch.cat([transfer[1:], transfer.new_zeros(1)])
    seconds, computing = [], []
    for rate, also in ((kernel.forward, torch.zeros_like(gradients)), (kernel.backward, gradients)):
        compute = calls * kernel.overhead + heads * scores * rate
        computing.append(float(compute.sum(0).max()))
        seconds.append(float(torch.maximum(compute.amax(1), following + also).sum()))
    seconds[0] += (ranks - 1) * link.latency
    home = float(gradients.max())
    passes = float(arriving.sum(0).max()) * position
    # Gradients travel as far as the keys did, and then from the last rank to the owner.
    sent = 2 * passes * work.itemsize + (passes + float(arriving.max()) * position) * _wide(work)
    return Estimate(sum(seconds) + home, sum(computing), sent, seconds[0], name)


def _exchanges(work: Work, ranks: int, link: Link) -> tuple[float, float]:
    """Seconds and bytes of all to all, forward and backward: query, key, value and output, and their gradients."""
    kv_heads = max(work.kv_heads, ranks)  # a head that several ranks need is sent to each
    elements = (work.heads + kv_heads) * (work.head_dim + work.value_dim)  # of a position
    whole = 2 * work.batch * work.length / ranks * elements * work.itemsize
    size = whole * (ranks - 1) / ranks
    seconds = 8 * (ranks - 1) * link.latency + size / link.bandwidth + 2 * whole * link.copying
    return (seconds if ranks > 1 else 0.0), size


@check_keywords
def both(
    work: Work, rings: int, alls: int, kernel: Kernel, link: Link, near: Link | None = None, placement: str = "zigzag"
) -> Estimate | None:
    """Heads distributed over `alls` ranks by `near` links (default: `link`), keys travelling round `rings` ranks.

    None if the heads do not divide.
    """
    group = work.heads // work.kv_heads
    if work.heads % alls or ((work.heads // alls) % group and group % (work.heads // alls)):
        return None
    here = replace(work, heads=work.heads // alls, kv_heads=max(work.kv_heads // alls, 1))
    name = "all_to_all" if rings == 1 else "ring" if alls == 1 else f"ring {rings} x all_to_all {alls}"
    inner = ring(here, rings, kernel, link, placement, name)
    share, near = replace(work, length=-(-work.length // rings)), near or link
    seconds, size = _exchanges(share, alls, near)
    agreement = (alls - 1) * near.latency
    forward = inner.forward + seconds / 2 + agreement
    return Estimate(inner.seconds + seconds + agreement, inner.computing, inner.sent + size, forward, inner.name)


@check_keywords
def all_to_all(work: Work, ranks: int, kernel: Kernel, link: Link) -> Estimate | None:
    """Heads are distributed over all ranks. None if they do not divide."""
    return both(work, 1, ranks, kernel, link)


@check_keywords
def one(work: Work, kernel: Kernel) -> Estimate:
    """One process."""
    return ring(work, 1, kernel, Link(0.0, 1.0), "contiguous", "one process")


@check_keywords
def grids(ranks: int) -> list[tuple[int, int]]:
    """The meshes (rings, alls) of `ranks` with both above 1."""
    return [(ranks // alls, alls) for alls in range(2, ranks) if ranks % alls == 0 and ranks // alls > 1]


@check_keywords
def best(work: Work, ranks: int, kernel: Kernel, link: Link, near: Link | None = None) -> Estimate | None:
    """The fastest 2-D mesh of `ranks`, among those where all_to_all has a power of two."""
    tried = [both(work, r, a, kernel, link, near) for r, a in grids(ranks) if a & (a - 1) == 0]
    return min((e for e in tried if e is not None), key=lambda e: e.seconds, default=None)
