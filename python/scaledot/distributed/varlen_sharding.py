"""How DTensor may shard packed sequences: by head, or not at all.

                query, output   lse        key, value                       a gradient of key, value
heads           Shard(1)        Shard(0)   Shard(-2), if ranks divide them  Shard(-2)
heads, one      Shard(1)        Shard(0)   Replicate                        Partial
key head
                Replicate       Replicate  Replicate                        Replicate

Where sequences begin, lengths and pages are the same on every rank. Sequences are not sharded: ranks that have
sequences of their own need no DTensor. With dropout nothing is sharded, for what is dropped is counted from the first
head.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .sharding import operands_of, register_rule, whole_on

__all__: list[str] = []

_OPS = torch.ops.scaledot
_NAMES = (
    "query", "key", "value", "cu_seq_q", "cu_seq_k", "seqused_k", "block_table", "alibi_slopes", "dropout_seed",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ the rules
def _divides(query: Sequence[int], key: Sequence[int], value: Sequence[int], size: int) -> bool:
    """Whether each of `size` ranks gets heads, and the key heads that they read."""
    if len(query) != 3 or min(len(key), len(value)) < 3:
        return False  # the op refuses it
    heads, kv_heads = query[1], (key[-2], value[-2])
    return heads % size == 0 and all(n % size == 0 or n == 1 for n in kv_heads)


def _inputs(by_head: bool, tensors: Sequence[Any]) -> list[Placement]:
    """Of the op's first nine arguments that are there."""
    found: list[Placement] = []
    for name, tensor in zip(_NAMES, tensors, strict=True):
        if tensor is None:
            continue
        shape = tensor.shape
        own: Placement = Replicate()
        if by_head and name == "query":
            own = Shard(1)
        elif by_head and name in ("key", "value") and shape[-2] != 1:
            own = Shard(len(shape) - 2)
        elif by_head and name == "alibi_slopes" and shape[-1] != 1:
            own = Shard(len(shape) - 1)
        found.append(own)
    return found


def _choices(query: Any, key: Any, value: Any, dropout_p: float) -> list[bool]:
    """Whether heads are sharded, in each rule."""
    sizes = query.mesh.shape
    by_head = dropout_p == 0 and any(_divides(query.shape, key.shape, value.shape, size) for size in sizes)
    return [False, True] if by_head else [False]


def _results(by_head: bool) -> list[Placement]:
    return [Shard(1), Shard(0)] if by_head else [Replicate(), Replicate()]


def _varlen(*arguments: Any, **options: Any) -> list[Any]:
    tensors = arguments[: len(_NAMES)]
    dropout_p = arguments[11] if len(arguments) > 11 else options.get("dropout_p", 0.0)
    query, key, value, *_ = tensors
    return [(_results(by_head), _inputs(by_head, tensors)) for by_head in _choices(query, key, value, dropout_p)]


def _varlen_backward(*arguments: Any) -> list[Any]:
    grads, tensors, saved = arguments[:2], arguments[2:11], arguments[11:13]
    dropout_p, output_mask = arguments[15], arguments[-1]
    found = []
    for by_head in _choices(tensors[0], tensors[1], tensors[2], dropout_p):
        results = _results(by_head)
        ahead = [p for p, t in zip(results, grads, strict=True) if t is not None]
        behind = [p for p, t in zip(results, saved, strict=True) if t is not None]
        inputs = _inputs(by_head, tensors)
        gradients: list[Placement] = []
        for wanted, own in zip(output_mask, inputs[:3], strict=True):
            summed = wanted and by_head and isinstance(own, Replicate)
            gradients.append(Partial() if summed else own if wanted else Replicate())
        found.append((gradients, ahead + inputs + behind))
    return found


register_rule(_OPS.varlen.default, _varlen, 9)
register_rule(_OPS.varlen_backward.default, _varlen_backward, 13)


# ----------------------------------------------------------------------------------------- varlen_attention on DTensors
def on_varlen_dtensors(tensors: Sequence[Tensor | None], dropout_p: float) -> tuple[Tensor | None, ...]:
    """The op's first nine arguments as DTensors, placed as one of the rules wants them.

    What tells sequences apart may be plain tensors, the same on every rank; the first rank's seed counts.
    """
    operands = operands_of(*tensors[:3])
    mesh = operands[0].device_mesh
    shapes = operands[0].shape, operands[1].shape, operands[2].shape
    size, by_head = 1, []
    for k, placement in enumerate(operands[0].placements):
        size *= mesh.size(k) if placement == Shard(1) else 1
        fits = placement == Shard(1) and dropout_p == 0 and _divides(*shapes, size)
        by_head.append(fits)
    wanted = [iter(_inputs(fits, tensors)) for fits in by_head]
    placed: list[Tensor | None] = []
    for name, tensor in zip(_NAMES, tensors, strict=True):
        if tensor is None:
            placed.append(None)
            continue
        placements = tuple(next(one) for one in wanted)
        if not isinstance(tensor, DTensor):
            tensor = whole_on(mesh, name, tensor)
        elif tensor.placements != placements and name in _NAMES[:3]:
            warnings.warn(
                f"{name}: placements {tensor.placements} do not suit packed sequences and are redistributed to "
                f"{placements}; shard heads, or give each rank sequences of its own in plain tensors",
                stacklevel=3,
            )
        placed.append(tensor.redistribute(placements=placements))
    return tuple(placed)
