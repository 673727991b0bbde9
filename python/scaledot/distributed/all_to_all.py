"""All to all over heads: each rank sends away all but its share of the heads, and gets all positions for that share.

    (B, H, l_r, D) on each of n ranks  ->  (B, H / n, l_0 + ... + l_{n-1}, D)  ->  attention  ->  (B, H, l_r, Dv)

DeepSpeed Ulysses: Jacobs et al., 2023. Lengths may differ from rank to rank. With grouped-query attention a rank gets
the key and value heads that its query heads read. If there are fewer of those than ranks, several ranks get the same
head, and its gradients are summed in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import transport

_Transfer = Callable[[Tensor], Tensor]


def query_heads(heads: int, ranks: int, rank: int) -> range:
    here = heads // ranks
    return range(rank * here, (rank + 1) * here)


def key_heads(heads: int, kv_heads: int, ranks: int, rank: int) -> range:
    """The key and value heads that the query heads of a rank read."""
    group, query = heads // kv_heads, query_heads(heads, ranks, rank)
    return range(query.start // group, query[-1] // group + 1)


def check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Raises ValueError if the heads cannot be distributed over the ranks."""
    if heads % ranks:
        raise ValueError(
            f"query: got {heads} heads; all_to_all over {ranks} ranks needs a multiple of {ranks} "
            f"(ring, or both on a 2-D mesh, has no such limit)"
        )
    here, group = heads // ranks, heads // kv_heads
    if here % group and group % here:
        raise ValueError(
            f"key: got {kv_heads} heads for query's {heads}; all_to_all over {ranks} ranks gives each {here} query "
            f"heads, so groups of {group} have to stay whole or to be cut evenly (ring has no such limit)"
        )


@dataclass(frozen=True)
class Deal:
    """How heads and positions are distributed over the ranks of a group."""

    group: Any
    rank: int
    lengths: tuple[int, ...]  # of each rank
    heads: tuple[range, ...]  # of each rank
    all_heads: int

    def gather(self, tensor: Tensor) -> Tensor:
        """(B, all heads, local length, D) -> (B, local heads, length of all, D)."""
        pieces = [transport.pack([tensor[:, h.start : h.stop]]) for h in self.heads]
        own = len(self.heads[self.rank])
        shapes = [(tensor.shape[0], own, length, tensor.shape[3]) for length in self.lengths]
        received = transport.all_to_all(pieces, [_bytes(shape, tensor) for shape in shapes], self.group)
        return torch.cat([r.view(tensor.dtype).view(s) for r, s in zip(received, shapes, strict=True)], 2)

    def scatter(self, tensor: Tensor) -> Tensor:
        """(B, local heads, length of all, D) -> (B, all heads, local length, D).

        Heads that several ranks have are summed, in float32 or float64.
        """
        pieces = [transport.pack([piece]) for piece in tensor.split(self.lengths, 2)]
        shapes = [(tensor.shape[0], len(h), self.lengths[self.rank], tensor.shape[3]) for h in self.heads]
        received = transport.all_to_all(pieces, [_bytes(shape, tensor) for shape in shapes], self.group)
        found = [r.view(tensor.dtype).view(s) for r, s in zip(received, shapes, strict=True)]
        if sum(map(len, self.heads)) == self.all_heads:
            return torch.cat(found, 1)
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        total = tensor.new_zeros(
            (tensor.shape[0], self.all_heads, self.lengths[self.rank], tensor.shape[3]), dtype=wide
        )
        for h, piece in zip(self.heads, found, strict=True):
            total[:, h.start : h.stop] += piece
        return total.to(tensor.dtype)


def _bytes(shape: Sequence[int], like: Tensor) -> int:
    return torch.Size(shape).numel() * like.element_size()


class Exchange(torch.autograd.Function):
    """`there` of a tensor, and `back` of its gradient: Deal.gather and Deal.scatter, or the other way round."""

    @staticmethod
    def forward(tensor: Tensor, there: _Transfer, back: _Transfer) -> Tensor:
        return there(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.back = inputs[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def deal(group: Any, lengths: Sequence[int], heads: int, kv_heads: int, keys: bool) -> Deal:
    """How query heads, or with `keys` key and value heads, are distributed."""
    ranks = dist.get_world_size(group)
    parts = tuple(
        key_heads(heads, kv_heads, ranks, rank) if keys else query_heads(heads, ranks, rank) for rank in range(ranks)
    )
    return Deal(group, dist.get_rank(group), tuple(lengths), parts, kv_heads if keys else heads)
