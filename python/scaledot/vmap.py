"""torch.vmap of the ops: one call over all samples, whose dimension becomes the first batch dimension.

What vmap does not batch broadcasts over that dimension like anything else. Where its gradient is asked for it is
expanded, as a view, because vmap wants a gradient for each sample. Each sample draws its dropout by a seed of its own
(randomness="different") or all by one ("same"), as a call for that sample alone would.

In Python, because torch 2.13 does not ship all that the headers of its C++ rules include. Importing this module
registers the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []

_INPUTS = 6  # query, key, value, attn_mask, alibi_slopes, dropout_seed
_NAMES = [a.name for a in torch.ops.scaledot.sdpa.default._schema.arguments]
_RETURN_WEIGHTS, _AVERAGE_WEIGHTS = _NAMES.index("return_weights"), _NAMES.index("average_weights")

MaybeTensor = Tensor | None
Dims = Sequence[Any]  # of each argument: the dimension of the samples, or None


def _front(tensor: Any, dim: int | None) -> Any:
    """The tensor with the samples first, if it has any."""
    return tensor if dim is None else tensor.movedim(dim, 0)


def samples_first(tensor: Tensor, dim: int | None, samples: int) -> Tensor:
    """(samples, ...), a view; expanded if vmap does not batch it."""
    return tensor.expand(samples, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _padded(tensor: Tensor, dims: int) -> Tensor:
    """(samples, ...) with dimensions of size 1 after the first until there are `dims` of them."""
    missing = dims + 1 - tensor.dim()
    return tensor.unflatten(0, (tensor.size(0), *[1] * missing)) if missing > 0 else tensor


class _Folded:
    """A call for all samples, made of a call that was written for one."""

    def __init__(self, samples: int, tensors: Sequence[MaybeTensor], in_dims: Dims, wanted: Sequence[bool]) -> None:
        """`tensors`: the first _INPUTS arguments of the op; `wanted`: those of the first four that get a gradient."""
        self.samples = samples
        # How many dimensions each has within a sample.
        self.own = [0 if t is None else t.dim() - (d is not None) for t, d in zip(tensors, in_dims, strict=True)]
        self.has_heads = max(self.own[:3]) > 2
        self.dims = max(3, *self.own[:3])
        expand = [*wanted, False, False]
        if all(d is None for d in in_dims[:3]):
            expand[0] = True  # a mask cannot widen the batch, query can
        self.inputs: list[MaybeTensor] = []
        for k, (tensor, dim) in enumerate(zip(tensors, in_dims, strict=True)):
            if tensor is None:
                self.inputs.append(None)
            elif k == 5:  # the seeds' sizes are those of the first batch dimensions
                self.inputs.append(samples_first(tensor, dim, samples))
            elif dim is None and not expand[k]:
                self.inputs.append(tensor)
            else:
                batched = samples_first(tensor, dim, samples)
                self.inputs.append(_padded(batched, self.dims - 2 if k == 4 else self.dims))

    @property
    def widens(self) -> bool:
        """Whether a mask has more dimensions than a sample's scores. The op would take them for the samples'."""
        return self.own[3] > (self.dims if self.has_heads else 2) or self.own[4] > self.dims - 2

    def result(self, tensor: MaybeTensor, dim: int | None) -> MaybeTensor:
        """An argument of the shape of one of sdpa's results."""
        if tensor is None:
            return None
        batched = samples_first(tensor, dim, self.samples)
        return batched if self.has_heads else batched.unsqueeze(1)

    def unfolded(self, result: Tensor) -> Tensor:
        return result if self.has_heads else result.squeeze(1)

    def gradient(self, k: int, gradient: Tensor) -> Tensor:
        """Without the dimensions that the k-th input was padded with."""
        missing = gradient.dim() - 1 - self.own[k]
        return gradient.squeeze(tuple(range(1, 1 + missing))) if missing > 0 else gradient


def sample_of(args: Sequence[Any], in_dims: Dims, k: int = 0) -> list[Any]:
    """The arguments of the sample of this number."""
    return [a if not isinstance(d, int) else a.select(d, k) for a, d in zip(args, in_dims, strict=True)]


def _inputs(args: Sequence[Any], in_dims: Dims) -> tuple[list[Any], list[Any]]:
    """The op's tensors and their dimensions; arguments at their defaults are not passed."""
    missing = [None] * max(0, _INPUTS - len(args))
    return [*args[:_INPUTS], *missing], [*in_dims[:_INPUTS], *missing]


def _call(op: Any, info: Any, in_dims: Dims, args: Sequence[Any]) -> tuple[_Folded, Any]:
    folded = _Folded(info.batch_size, *_inputs(args, in_dims), (False,) * 4)
    try:
        if folded.widens:
            raise ValueError("a mask has more dimensions than the scores")
        return folded, op(*folded.inputs, *args[_INPUTS:])
    except (TypeError, ValueError):
        op(*sample_of(args, in_dims))  # the op's own message, of the shapes that the caller knows
        raise


def _sdpa(info: Any, in_dims: Dims, *args: Any) -> Any:
    folded, (output, lse, weights) = _call(torch.ops.scaledot.sdpa.default, info, in_dims, args)
    output, lse = folded.unfolded(output), folded.unfolded(lse)
    if len(args) > _RETURN_WEIGHTS and args[_RETURN_WEIGHTS]:
        averaged = len(args) > _AVERAGE_WEIGHTS and args[_AVERAGE_WEIGHTS]
        return (output, lse, weights if averaged else folded.unfolded(weights)), (0, 0, 0)
    return (output, lse, weights), (0, 0, None)


def _explain(info: Any, in_dims: Dims, *args: Any) -> Any:
    return _call(torch.ops.scaledot.explain.default, info, in_dims, args)[1], None


def _sdpa_backward(info: Any, in_dims: Dims, *args: Any) -> Any:
    grads, inputs, results = slice(0, 3), slice(3, 3 + _INPUTS), slice(3 + _INPUTS, 6 + _INPUTS)
    wanted = args[-1]
    folded = _Folded(info.batch_size, args[inputs], in_dims[inputs], wanted)
    computed = torch.ops.scaledot.sdpa_backward.default(
        *map(folded.result, args[grads], in_dims[grads]),
        *folded.inputs,
        *map(folded.result, args[results], in_dims[results]),
        *args[results.stop :],
    )
    gradients = [folded.gradient(k, g) if wanted[k] else g for k, g in enumerate(computed)]
    return tuple(gradients), tuple(0 if w else None for w in wanted)


def _sdpa_mask(info: Any, in_dims: Dims, query: Tensor, key: Tensor, slopes: MaybeTensor = None, *args: Any) -> Any:
    """Of query and key only sizes matter: any sample's will do."""
    dims = (*in_dims, None)
    query, key = sample_of((query, key), dims[:2])
    attends, bias = torch.ops.scaledot.sdpa_mask.default(query, key, _front(slopes, dims[2]), *args)
    return (attends, bias), (None, None if dims[2] is None else 0)


def _dropout_mask(info: Any, in_dims: Dims, seed: Tensor, batch: int, *args: Any) -> Any:
    kept = torch.ops.scaledot.dropout_mask.default(_front(seed, in_dims[0]), info.batch_size * batch, *args)
    return kept.unflatten(0, (info.batch_size, batch)), 0


for _rule in (_sdpa, _explain, _sdpa_backward, _sdpa_mask, _dropout_mask):
    torch.library.register_vmap(f"scaledot::{_rule.__name__[1:]}", _rule)
