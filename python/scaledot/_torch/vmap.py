"""torch.vmap of the ops: one call over all samples, whose dimension becomes the first batch dimension.

A tensor that vmap does not batch broadcasts over that dimension. If its gradient is wanted it is expanded, as a view,
because vmap wants a gradient for each sample. With randomness="different" each sample has its own dropout seed, with
"same" all share one; either way a sample drops what a call for it alone would drop with its seed.

The rules are in Python because torch 2.13 does not ship all that the headers for C++ rules include. Importing this
module registers them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._load import OPS
from .._namespace import NAMESPACE
from .inputs import DIFFERENTIABLE, DIMS_LESS, INPUTS, SHARED
from .out import no_out_under_vmap, refuse_out_under_vmap
from .schema import given

__all__: list[str] = []

Dims = Sequence[Any]  # for each argument the dimension of the samples, or None

_LIKE_RESULTS = ("grad_output", "grad_lse", "grad_weights", "output", "lse", "weights", "saved")


def samples_first(tensor: Tensor, dim: int | None, samples: int) -> Tensor:
    """(samples, ...), a view; expanded if vmap does not batch it."""
    return tensor.expand(samples, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def sample_of(arguments: Mapping[str, Any], dims: Mapping[str, Any], k: int = 0) -> dict[str, Any]:
    """The arguments of sample k."""
    return {name: a.select(dims[name], k) if isinstance(dims[name], int) else a for name, a in arguments.items()}


def _padded(tensor: Tensor, dims: int) -> Tensor:
    """(samples, ...) with dimensions of size 1 after the first, so that a sample has `dims` dimensions."""
    missing = dims + 1 - tensor.dim()
    return tensor.unflatten(0, (tensor.size(0), *[1] * missing)) if missing > 0 else tensor


class _Folded:
    """The inputs of one call for all samples, made from those of a call that was written for one."""

    def __init__(
        self, samples: int, arguments: Mapping[str, Any], dims: Mapping[str, Any], wanted: Collection[str] = ()
    ) -> None:
        """`arguments`: the op's, by name. `wanted`: the inputs whose gradients are wanted."""
        self.samples = samples
        tensors = {name: arguments[name] for name in INPUTS if arguments.get(name) is not None}
        # The number of dimensions that each has within a sample.
        self.own = {name: t.dim() - (dims[name] is not None) for name, t in tensors.items()}
        main = [self.own[name] for name in ("query", "key", "value")]
        self.has_heads = max(main) > 2
        self.dims = max(3, *main)
        expanded = set(wanted)
        if all(dims[name] is None for name in ("query", "key", "value")):
            expanded.add("query")  # a mask cannot widen the batch, query can
        self.inputs: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            dim = dims[name]
            if name == "block_bits":  # each sample's after those of the one before
                self.inputs[name] = tensor if dim is None else samples_first(tensor, dim, samples).flatten(0, 1)
            elif name in SHARED:
                if dim is not None or name in expanded:
                    raise NotImplementedError(
                        "score_mod: got a captured tensor with a dimension or a gradient under torch.vmap; needs one "
                        "that all samples share, without a gradient"
                    )
                self.inputs[name] = tensor
            elif name == "dropout_seed":  # it has the sizes of the first batch dimensions
                self.inputs[name] = samples_first(tensor, dim, samples)
            elif dim is None and name not in expanded:
                self.inputs[name] = tensor
            else:
                batched = samples_first(tensor, dim, samples)
                self.inputs[name] = _padded(batched, self.dims - DIMS_LESS.get(name, 0))
        if dims.get("block_bits") is not None and "blocks" in self.inputs:
            self._renumber_blocks(tensors["block_bits"].size(0 if dims["block_bits"] else 1), dims["blocks"])

    def _renumber_blocks(self, count: int, dim: int | None) -> None:
        """Block number n of sample k, which has bits, becomes k * count + n."""
        numbers = self.inputs["blocks"]
        if dim is None:
            numbers = _padded(samples_first(numbers, None, self.samples), self.dims)
        first = torch.arange(self.samples, dtype=torch.int32, device=numbers.device) * count
        first = first.view(-1, *[1] * (numbers.dim() - 1))
        self.inputs["blocks"] = torch.where(numbers >= 0, numbers + first, numbers)

    @property
    def widens(self) -> bool:
        """Whether a mask has more dimensions than a sample's scores; the op would take those for the samples'."""
        vectors = any(self.own.get(name, 0) > self.dims - less for name, less in DIMS_LESS.items())
        mask = max(self.own.get(name, 0) for name in ("attn_mask", "blocks", "key_indices"))
        return mask > (self.dims if self.has_heads else 2) or vectors

    def like_result(self, tensor: Tensor | None, dim: int | None) -> Tensor | None:
        """An argument that has the shape of one of sdpa's results."""
        if tensor is None:
            return None
        batched = samples_first(tensor, dim, self.samples)
        return batched if self.has_heads else batched.unsqueeze(1)

    def unfolded(self, result: Tensor) -> Tensor:
        return result if self.has_heads else result.squeeze(1)

    def gradient(self, name: str, gradient: Tensor) -> Tensor:
        """Without the dimensions with which the input of this name was padded."""
        missing = gradient.dim() - 1 - self.own[name]
        return gradient.squeeze(tuple(range(1, 1 + missing))) if missing > 0 else gradient


def _call(op: Any, info: Any, arguments: Mapping[str, Any], dims: Mapping[str, Any]) -> tuple[_Folded, Any]:
    folded = _Folded(info.batch_size, arguments, dims)
    try:
        if folded.widens:
            raise ValueError("a mask has more dimensions than the scores")
        # A sample's output_strides say nothing of the output of all samples.
        return folded, op(**{**arguments, **folded.inputs, "output_strides": None})
    except (TypeError, ValueError):
        op(**sample_of(arguments, dims))  # raises the op's own message, with the shapes that the caller knows
        raise


def _forward(op: Any, info: Any, in_dims: Dims, args: Sequence[Any]) -> Any:
    arguments, dims = given(op, args), given(op, in_dims)
    folded, (output, lse, weights, *saved) = _call(op, info, arguments, dims)
    if arguments.get("return_weights") and not arguments.get("average_weights"):
        weights = folded.unfolded(weights)
    results, out_dims = [folded.unfolded(output), folded.unfolded(lse), weights], [0, 0, None]
    if arguments.get("return_weights"):
        out_dims[2] = 0
    if saved:
        saves = arguments.get("saved_keys") is not None or arguments.get("save_output_low")
        results.append(folded.unfolded(saved[0]) if saves else saved[0])
        out_dims.append(0 if saves else None)
    return tuple(results), tuple(out_dims)


def _sdpa(info: Any, in_dims: Dims, *args: Any) -> Any:
    return _forward(OPS.sdpa.default, info, in_dims, args)


def _sdpa_recorded(info: Any, in_dims: Dims, *args: Any) -> Any:
    return _forward(OPS.sdpa_recorded.default, info, in_dims, args)


def _explain(info: Any, in_dims: Dims, *args: Any) -> Any:
    op = OPS.explain.default
    arguments = given(op, args)
    no_out_under_vmap(arguments)
    return _call(op, info, arguments, given(op, in_dims))[1], None


def _sdpa_backward(info: Any, in_dims: Dims, *args: Any) -> Any:
    op = OPS.sdpa_backward.default
    arguments, dims = given(op, args), given(op, in_dims)
    wanted = dict(zip(DIFFERENTIABLE, arguments["output_mask"], strict=True))
    folded = _Folded(info.batch_size, arguments, dims, [name for name, want in wanted.items() if want])
    like_results = {name: folded.like_result(arguments[name], dims[name]) for name in _LIKE_RESULTS}
    computed = zip(wanted.items(), op(**{**arguments, **folded.inputs, **like_results}), strict=True)
    gradients = tuple(folded.gradient(name, g) if want else g for (name, want), g in computed)
    return gradients, tuple(0 if want else None for want in wanted.values())


def _sdpa_mask(info: Any, in_dims: Dims, *args: Any) -> Any:
    """Only the sizes of query and key matter, so those of any sample will do."""
    op = OPS.sdpa_mask.default
    arguments, dims = given(op, args), given(op, in_dims)
    slopes = dims.pop("alibi_slopes", None)
    one = sample_of(arguments, {"alibi_slopes": None, **dims})
    if slopes is not None:
        one["alibi_slopes"] = one["alibi_slopes"].movedim(slopes, 0)
    attends, bias = op(**one)
    return (attends, bias), (None, None if slopes is None else 0)


def _dropout_mask(info: Any, in_dims: Dims, *args: Any) -> Any:
    op = OPS.dropout_mask.default
    arguments, dims = given(op, args), given(op, in_dims)
    batch = arguments["batch"]
    seeds = arguments["seed"].movedim(dims["seed"], 0)
    kept = op(**{**arguments, "seed": seeds, "batch": info.batch_size * batch})
    return kept.unflatten(0, (info.batch_size, batch)), 0


for _rule in (_sdpa, _sdpa_recorded, _explain, _sdpa_backward, _sdpa_mask, _dropout_mask):
    torch.library.register_vmap(f"{NAMESPACE}::{_rule.__name__[1:]}", _rule)
torch.library.register_vmap(f"{NAMESPACE}::sdpa_out", refuse_out_under_vmap)
