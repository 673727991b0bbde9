"""torch.vmap of the packed ops: one call, in which the sequences of a sample follow those of the sample before.

A sequence gets what it gets alone, so a sample gets what it gets alone, whatever its lengths are: cu_seq_q and its like
may be batched too. Each sample has its own dropout seed, which counts its sequences from 0. What vmap does not batch is
repeated, but for pages of keys and values, which all samples read.

Numbers in cu_seq_q and its like that are wrong for their sample could be right where the samples lie one after the
other. Such a sample's become -1, which is wrong everywhere: so there is an error where numbers are looked at, on a CPU.

Importing this module registers the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .vmap import Dims, MaybeTensor, sample_of, samples_first

__all__: list[str] = []

# Dimensions of the op's tensors in a call for one sample; key and value have one more where they lie in pages.
_DIMS = {
    "query": (3,),
    "key": (3,),
    "value": (3,),
    "cu_seq_q": (1,),
    "cu_seq_k": (1,),
    "seqused_k": (1,),
    "block_table": (2,),
    "alibi_slopes": (1, 2),
    "dropout_seed": (1, 2),
}
_INPUTS = len(_DIMS)
_COUNTED = ("cu_seq_q", "cu_seq_k", "block_table")  # what counts rows or pages, and counts on from sample to sample


class _Samples:
    """The op's tensors with the samples first, and what a call for all samples takes in their place."""

    def __init__(self, samples: int, tensors: Sequence[MaybeTensor], in_dims: Dims) -> None:
        """Raises ValueError for shapes that no sample may have."""
        given = dict(zip(_DIMS, zip(tensors, in_dims, strict=True), strict=True))
        paged = tensors[6] is not None
        self.samples = samples
        self.of = {n: samples_first(t, dim, samples) for n, (t, dim) in given.items() if t is not None}
        for name, tensor in self.of.items():
            if tensor.dim() - 1 - (paged and name in ("key", "value")) not in _DIMS[name]:
                raise ValueError(f"{name}: got samples of shape {tuple(tensor.shape[1:])}")
            if name in _COUNTED and tensor.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name}: got dtype {tensor.dtype}")
        self.sequences = self.of["cu_seq_q"].size(1) - 1
        if self.sequences < 0:
            raise ValueError("cu_seq_q: got no numbers")
        # What all samples read from one place, because no rows of it are counted.
        self.pool = tensors[1:3] if paged and in_dims[1] is None and in_dims[2] is None else None
        self.slopes = tensors[7] if in_dims[7] is None and tensors[7] is not None and tensors[7].dim() == 1 else None

    def inputs(self) -> list[MaybeTensor]:
        key, value = self.pool if self.pool is not None else (self._flat("key"), self._flat("value"))
        return [
            self._flat("query"),
            key,
            value,
            self._bounds("cu_seq_q", "query"),
            self._bounds("cu_seq_k", "key"),
            self._flat("seqused_k"),
            self._flat("block_table") if self.pool is not None else self._table(),
            self._slopes(),
            self.of["dropout_seed"].reshape(-1, 2) if "dropout_seed" in self.of else None,
        ]

    def _flat(self, name: str) -> MaybeTensor:
        return self.of[name].flatten(0, 1) if name in self.of else None

    def _firsts(self, count: int, like: Tensor) -> Tensor:
        """Where each sample begins, which has `count` rows or pages."""
        return torch.arange(self.samples, device=like.device, dtype=torch.int64) * count

    def _bounds(self, name: str, rows: str) -> MaybeTensor:
        """cu_seq_q or cu_seq_k. A sample's last number is left out: it is the next one's first."""
        if name not in self.of:
            return None
        own, count = self.of[name].long(), self.of[rows].size(1)
        fits = (own[:, :1] == 0) & (own[:, -1:] == count)
        begins = torch.where(fits, own[:, :-1] + self._firsts(count, own)[:, None], -1)
        return torch.cat([begins.flatten(), own.new_full((1,), self.samples * count)])

    def _table(self) -> MaybeTensor:
        """block_table, where each sample has a pool of its own."""
        if "block_table" not in self.of:
            return None
        own, pages = self.of["block_table"].long(), self.of["key"].size(1)
        return torch.where((own >= 0) & (own < pages), own + self._firsts(pages, own)[:, None, None], -1).flatten(0, 1)

    def _slopes(self) -> MaybeTensor:
        if self.slopes is not None or "alibi_slopes" not in self.of:
            return self.slopes
        own = self.of["alibi_slopes"]
        return own.flatten(0, 1) if own.dim() == 3 else own.repeat_interleave(self.sequences, 0)

    def output(self, tensor: MaybeTensor, dim: int | None) -> MaybeTensor:
        """An argument of the shape of output, (rows, ...)."""
        return None if tensor is None else samples_first(tensor, dim, self.samples).flatten(0, 1)

    def lse(self, tensor: MaybeTensor, dim: int | None) -> MaybeTensor:
        """An argument of the shape of lse, (heads, rows)."""
        return None if tensor is None else samples_first(tensor, dim, self.samples).transpose(0, 1).flatten(1)

    def apart(self, tensor: Tensor, like: str, dim: int = 0) -> Tensor:
        """The rows of each sample."""
        return tensor.unflatten(dim, (self.samples, self.of[like].size(1)))


def _call(op: Any, info: Any, in_dims: Dims, args: Sequence[Any]) -> tuple[_Samples, Any]:
    try:
        samples = _Samples(info.batch_size, args[:_INPUTS], in_dims[:_INPUTS])
        return samples, op(*samples.inputs(), *args[_INPUTS:])
    except (TypeError, ValueError):
        for k in range(info.batch_size):
            op(*sample_of(args, in_dims, k))  # the op's own message, of what the caller knows
        raise


def _varlen(info: Any, in_dims: Dims, *args: Any) -> Any:
    samples, (output, lse) = _call(torch.ops.scaledot.varlen.default, info, in_dims, args)
    return (samples.apart(output, "query"), samples.apart(lse, "query", 1)), (0, 1)


def _explain_varlen(info: Any, in_dims: Dims, *args: Any) -> Any:
    return _call(torch.ops.scaledot.explain_varlen.default, info, in_dims, args)[1], None


def _varlen_backward(info: Any, in_dims: Dims, *args: Any) -> Any:
    inputs, wanted = slice(2, 2 + _INPUTS), args[-1]
    grad_output, grad_lse, output, lse = (*args[:2], *args[inputs.stop : inputs.stop + 2])
    dims = (*in_dims[:2], *in_dims[inputs.stop : inputs.stop + 2])
    samples = _Samples(info.batch_size, args[inputs], in_dims[inputs])
    computed = torch.ops.scaledot.varlen_backward.default(
        samples.output(grad_output, dims[0]),
        samples.lse(grad_lse, dims[1]),
        *samples.inputs(),
        samples.output(output, dims[2]),
        samples.lse(lse, dims[3]),
        *args[inputs.stop + 2 :],
    )
    names = ("query", "key", "value")
    gradients = (samples.apart(g, n) if w else g for g, n, w in zip(computed, names, wanted, strict=True))
    return tuple(gradients), tuple(0 if w else None for w in wanted)


for _rule in (_varlen, _explain_varlen, _varlen_backward):
    torch.library.register_vmap(f"scaledot::{_rule.__name__[1:]}", _rule)
