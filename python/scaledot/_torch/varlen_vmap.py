"""torch.vmap of the packed ops: one call, in which the sequences of a sample follow those of the sample before.

A sequence gets what it gets alone, and so does a sample, whatever its lengths: cu_seq_q, cu_seq_k and the like may be
batched too. Each sample has its own dropout seed, which counts its sequences from 0. Tensors that vmap does not batch
are repeated, except pages of keys and values, which all samples share.

A wrong number in one sample's cu_seq_q, cu_seq_k or block_table could be a right one among all samples. Such a number
becomes -1, which is wrong everywhere, so that a CPU, which checks these numbers, still raises its error.

Importing this module registers the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._load import OPS
from .._namespace import NAMESPACE
from .out import no_out_under_vmap, refuse_out_under_vmap
from .schema import given
from .vmap import Dims, sample_of, samples_first

__all__: list[str] = []

# Dimensions of the op's tensors in a call for one sample; key and value have one more if they are in pages.
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
    "relative_bias": (1, 2, 3),
    "k_scale": (0, 1, 2),
    "v_scale": (0, 1, 2),
    "attn_mask": (2, 3),
}
_SCALES = ("k_scale", "v_scale")
_COUNTED = ("cu_seq_q", "cu_seq_k", "block_table")  # count rows or pages, and count on from sample to sample


class _Samples:
    """The op's tensors with the samples first, and what a call for all samples takes in their place."""

    def __init__(
        self, samples: int, arguments: Mapping[str, Any], dims: Mapping[str, Any], wants_bias: bool = False
    ) -> None:
        """Raises TypeError or ValueError for tensors that no sample may have.

        `wants_bias`: the gradient of relative_bias is wanted, so each sample needs its own.
        """
        self.samples = samples
        tensors = {name: arguments[name] for name in _DIMS if arguments[name] is not None}
        paged = "block_table" in tensors
        self.of = {name: samples_first(tensor, dims[name], samples) for name, tensor in tensors.items()}
        for name, tensor in self.of.items():
            if tensor.dim() - 1 - (paged and name in ("key", "value")) not in _DIMS[name]:
                raise ValueError(f"{name}: got samples of shape {tuple(tensor.shape[1:])}")
            if name in _COUNTED and tensor.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name}: got dtype {tensor.dtype}")
        self.sequences = self.of["cu_seq_q"].size(1) - 1
        if self.sequences < 0:
            raise ValueError("cu_seq_q: got no numbers")
        # Tensors that all samples share, because none of their rows are counted.
        self.shared: dict[str, Tensor] = {}
        if paged and dims["key"] is None and dims["value"] is None:
            self.shared = {"key": tensors["key"], "value": tensors["value"]}
        if "alibi_slopes" in tensors and dims["alibi_slopes"] is None and tensors["alibi_slopes"].dim() == 1:
            self.shared["alibi_slopes"] = tensors["alibi_slopes"]
        if "relative_bias" in tensors and dims["relative_bias"] is None and not wants_bias:
            bias = tensors["relative_bias"]
            if bias.dim() < 3 or bias.size(0) == 1:
                self.shared["relative_bias"] = bias

        for name in _SCALES:
            if name in tensors and dims[name] is None and tensors[name].dim() < 2:
                self.shared[name] = tensors[name]

    def inputs(self) -> dict[str, Tensor]:
        """The tensors of the call for all samples, by name."""
        found = {name: tensor for name, tensor in self.of.items() if name not in self.shared}
        for name in ("query", "key", "value", "seqused_k"):
            if name in found:
                found[name] = found[name].flatten(0, 1)
        found["cu_seq_q"] = self._bounds("cu_seq_q", "query")
        if "cu_seq_k" in found:
            found["cu_seq_k"] = self._bounds("cu_seq_k", "key")
        if "block_table" in found:
            found["block_table"] = found["block_table"].flatten(0, 1) if "key" in self.shared else self._table()
        if "alibi_slopes" in found:
            slopes = found["alibi_slopes"]
            one_each = slopes.dim() == 3  # for each sequence
            found["alibi_slopes"] = slopes.flatten(0, 1) if one_each else slopes.repeat_interleave(self.sequences, 0)
        if "relative_bias" in found:
            found["relative_bias"] = self._bias(found["relative_bias"])
        for name in _SCALES:
            if name in found:
                found[name] = self._scale(name, found[name])
        if "attn_mask" in found:
            found["attn_mask"] = self._mask(found["attn_mask"])
        if "dropout_seed" in found:
            found["dropout_seed"] = found["dropout_seed"].reshape(-1, 2)
        return found | self.shared

    def _scale(self, name: str, scale: Tensor) -> Tensor:
        """k_scale or v_scale, (samples, ...), for each sequence of each sample: (sequences of all, Hkv)."""
        own, heads = scale.shape[1:], self.of["key"].size(-2)
        if tuple(own) not in ((), (heads,), (self.sequences, heads)):
            needs = f"(), ({heads},) or ({self.sequences}, {heads})"
            raise ValueError(f"{name}: got samples of shape {tuple(own)}; needs {needs}")
        while scale.dim() < 3:
            scale = scale.unsqueeze(1)
        return scale.expand(-1, self.sequences, heads).flatten(0, 1)

    def _mask(self, mask: Tensor) -> Tensor:
        """attn_mask, (samples, ...), with the rows of all samples: (rows of all, W), or with heads before them."""
        return mask.flatten(0, 1) if mask.dim() == 3 else mask.transpose(0, 1).flatten(1, 2)

    def mask_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of each sample's attn_mask from that of `_mask`."""
        return self.divided(gradient, "query", gradient.dim() - 2).movedim(-3, 0)

    def _bias(self, bias: Tensor) -> Tensor:
        """relative_bias, (samples, ...), for each sequence of each sample: (sequences of all, H or 1, 2 M + 1)."""
        while bias.dim() < 4:
            bias = bias.unsqueeze(1)
        return bias.expand(-1, self.sequences, -1, -1).flatten(0, 1) if bias.size(1) == 1 else bias.flatten(0, 1)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of each sample's relative_bias from that of `_bias`."""
        own = self.of["relative_bias"].shape
        gradient = gradient.unflatten(0, (self.samples, self.sequences))
        one_each = len(own) == 4 and own[1] != 1  # for each sequence
        return gradient if one_each else gradient.sum(1).reshape(own)

    def _firsts(self, count: int, like: Tensor) -> Tensor:
        """Where each sample begins, if each has `count` rows or pages."""
        return torch.arange(self.samples, device=like.device, dtype=torch.int64) * count

    def _bounds(self, name: str, rows: str) -> Tensor:
        """cu_seq_q or cu_seq_k. The last number of a sample is left out: it is the first one of the next."""
        own, count = self.of[name].long(), self.of[rows].size(1)
        fits = (own[:, :1] == 0) & (own[:, -1:] == count)
        begins = torch.where(fits, own[:, :-1] + self._firsts(count, own)[:, None], -1)
        return torch.cat([begins.flatten(), own.new_full((1,), self.samples * count)])

    def _table(self) -> Tensor:
        """block_table, if each sample has its own pool."""
        own, pages = self.of["block_table"].long(), self.of["key"].size(1)
        return torch.where((own >= 0) & (own < pages), own + self._firsts(pages, own)[:, None, None], -1).flatten(0, 1)

    def like_output(self, tensor: Tensor | None, dim: int | None) -> Tensor | None:
        """An argument of the shape of output, (rows, ...)."""
        return None if tensor is None else samples_first(tensor, dim, self.samples).flatten(0, 1)

    def like_lse(self, tensor: Tensor | None, dim: int | None) -> Tensor | None:
        """An argument of the shape of lse, (heads, rows)."""
        return None if tensor is None else samples_first(tensor, dim, self.samples).transpose(0, 1).flatten(1)

    def divided(self, tensor: Tensor, like: str, dim: int = 0) -> Tensor:
        """A result with its rows, those of the input `like`, divided into samples."""
        return tensor.unflatten(dim, (self.samples, self.of[like].size(1)))


def _call(op: Any, info: Any, in_dims: Dims, args: Any) -> tuple[_Samples, Any]:
    arguments, dims = given(op, args), given(op, in_dims)
    try:
        samples = _Samples(info.batch_size, arguments, dims)
        return samples, op(**{**arguments, **samples.inputs()})
    except (TypeError, ValueError):
        for k in range(info.batch_size):
            op(**sample_of(arguments, dims, k))  # raises the op's own message, about what the caller knows
        raise


def _varlen(info: Any, in_dims: Dims, *args: Any) -> Any:
    samples, (output, lse) = _call(OPS.varlen.default, info, in_dims, args)
    return (samples.divided(output, "query"), samples.divided(lse, "query", 1)), (0, 1)


def _varlen_recorded(info: Any, in_dims: Dims, *args: Any) -> Any:
    op = OPS.varlen_recorded.default
    samples, (output, lse, saved) = _call(op, info, in_dims, args)
    results = samples.divided(output, "query"), samples.divided(lse, "query", 1)
    if not given(op, args).get("save_output_low"):
        return (*results, saved), (0, 1, None)
    return (*results, samples.divided(saved, "query")), (0, 1, 0)


def _explain_varlen(info: Any, in_dims: Dims, *args: Any) -> Any:
    op = OPS.explain_varlen.default
    no_out_under_vmap(given(op, args))
    return _call(op, info, in_dims, args)[1], None


def _varlen_backward(info: Any, in_dims: Dims, *args: Any) -> Any:
    op = OPS.varlen_backward.default
    arguments, dims = given(op, args), given(op, in_dims)
    wanted = arguments["output_mask"]
    samples = _Samples(info.batch_size, arguments, dims, wants_bias=wanted[3])
    like_results = {
        **{name: samples.like_output(arguments[name], dims[name]) for name in ("grad_output", "output", "saved")},
        **{name: samples.like_lse(arguments[name], dims[name]) for name in ("grad_lse", "lse")},
    }
    computed = op(**{**arguments, **samples.inputs(), **like_results})
    *computed, bias, mask = computed
    names = ("query", "key", "value")
    gradients = [samples.divided(g, n) if w else g for g, n, w in zip(computed, names, wanted, strict=False)]
    gradients.append(samples.bias_gradient(bias) if wanted[3] else bias)
    gradients.append(samples.mask_gradient(mask) if wanted[4] else mask)
    return tuple(gradients), tuple(0 if w else None for w in wanted)


for _rule in (_varlen, _varlen_recorded, _explain_varlen, _varlen_backward):
    torch.library.register_vmap(f"{NAMESPACE}::{_rule.__name__[1:]}", _rule)
torch.library.register_vmap(f"{NAMESPACE}::varlen_out", refuse_out_under_vmap)
