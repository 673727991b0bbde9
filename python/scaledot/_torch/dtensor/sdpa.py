"""How DTensor may shard scaled_dot_product_attention: by batch entry, by head, or not at all.

                          query, output, lse     key, value                       a gradient of key, value
batch (equal sizes)       Shard(d)               Shard(d)                         Shard(d)
heads                     Shard(-3)              Shard(-3), if ranks divide them  Shard(-3)
heads, one KV head       Shard(-3)              Replicate                        Partial
                          Replicate              Replicate                        Replicate

Masks and slopes are sharded along the dimension if they have it, and replicated if they broadcast over it; the gradient
of one that broadcasts is Partial. DTensor redistributes anything else to one of these. Its CommDebugMode and
ExplicitRedistributionContext show that, and scaled_dot_product_attention warns about it.

Importing this module registers the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..._load import OPS
from ..inputs import DIFFERENTIABLE, DIMS_LESS, INPUTS, SHARED
from .rules import Sharding, operands_of, register_rule, replicated, with_placements

__all__ = ["place"]


# ------------------------------------------------------------------------------------------------------------ the rules
def _candidates(query: Sequence[int], key: Sequence[int], value: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The dimensions, counted from the last, that can be sharded over one of `sizes` ranks; -3 is the heads'."""
    found = []
    if min(len(query), len(key), len(value)) >= 3:
        heads, kv_heads = query[-3], {key[-3], value[-3]}
        divides = [size for size in sizes if heads % size == 0 and all(n % size == 0 or n == 1 for n in kv_heads)]
        if divides and heads >= max(kv_heads):
            found.append(-3)
        for dim in range(-4, -min(len(query), len(key), len(value)) - 1, -1):
            if query[dim] == key[dim] == value[dim] and query[dim] > 1:
                found.append(dim)
    return found


def _along(shape: Sequence[int], dim: int | None) -> Placement:
    """The placement of a tensor of `shape` if `dim`, counted from the last, is sharded; None: nothing is."""
    if dim is None or len(shape) < -dim or shape[dim] == 1:
        return Replicate()
    return Shard(len(shape) + dim)


def _placements(dim: int | None, tensors: Mapping[str, Any]) -> dict[str, Placement]:
    """The placements of the inputs that are not None if `dim` is sharded; None: nothing is."""
    found: dict[str, Placement] = {}
    for name in INPUTS:
        if tensors[name] is None:
            continue
        shape = tensors[name].shape
        if name in ("dropout_seed", "block_bits", *SHARED):
            found[name] = Replicate()
        else:
            rows_and_columns = [*shape[: len(shape) - 2 + DIMS_LESS[name]], 1, 1] if name in DIMS_LESS else shape
            found[name] = _along(rows_and_columns, dim)
    return found


def _dims(arguments: Mapping[str, Any]) -> list[int | None]:
    """The dimensions that may be sharded; None: none of them.

    With dropout nothing may be, unless `part` says where this rank's rows and heads begin. Neither may it with
    output_strides, which are those of the whole output.
    """
    if (arguments["dropout_p"] > 0 and not arguments["part"]) or arguments.get("output_strides"):
        return [None]
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    return [None, *_candidates(query.shape, key.shape, value.shape, query.mesh.shape)]


def _sdpa(arguments: Mapping[str, Any]) -> list[Sharding]:
    found = []
    for dim in _dims(arguments):
        if arguments["average_weights"] and dim == -3:
            continue  # the mean is over all heads
        output: Placement = Replicate() if dim is None else Shard(len(arguments["query"].shape) + dim)
        weights = output if arguments["return_weights"] else Replicate()
        found.append(([output, output, weights], list(_placements(dim, arguments).values())))
    return found


def _sdpa_recorded(arguments: Mapping[str, Any]) -> list[Sharding]:
    saves = arguments["saved_keys"] is not None or arguments["save_output_low"]
    return [([*results, results[0] if saves else Replicate()], inputs) for results, inputs in _sdpa(arguments)]


def _sdpa_backward(arguments: Mapping[str, Any]) -> list[Sharding]:
    found = []
    for dim in _dims(arguments):
        inputs = _placements(dim, arguments)
        result: Placement = Replicate() if dim is None else Shard(len(arguments["query"].shape) + dim)
        gradients: list[Placement] = []
        for wanted, name in zip(arguments["output_mask"], DIFFERENTIABLE, strict=True):
            own = inputs.get(name, Replicate())
            summed = wanted and dim is not None and isinstance(own, Replicate)
            gradients.append(Partial() if summed else own if wanted else Replicate())
        placements = [
            inputs.get(name, result)  # the others have the shape of a result
            for name, argument in arguments.items()
            if hasattr(argument, "placements")
        ]
        found.append((gradients, placements))
    return found


register_rule(OPS.sdpa.default, _sdpa)
register_rule(OPS.sdpa_recorded.default, _sdpa_recorded)
register_rule(OPS.sdpa_backward.default, _sdpa_backward)
# The double backward calls these for positions and seeds alone.
register_rule(OPS.sdpa_mask.default, lambda arguments: [replicated(arguments, 2)])
register_rule(OPS.dropout_mask.default, lambda arguments: [replicated(arguments, 1)])


# --------------------------------------------------------------------------- scaled_dot_product_attention on DTensors
def place(
    query: Tensor, key: Tensor, value: Tensor, arguments: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """The op's arguments with all tensors as DTensors, placed as one of the rules needs them.

    A plain mask or plain slopes have to be whole and the same on every rank. A plain dropout seed is taken from the
    first rank. With dropout the op gets its `part`, which tells it the batch entries and heads that are here, so that
    it drops the weights that one process drops.
    """
    operands = operands_of(query, key, value)
    mesh = operands[0].device_mesh
    tensors = {name: arguments.get(name) for name in INPUTS} | {"query": query, "key": key, "value": value}
    targets: list[dict[str, Placement]] = []
    dims: list[int | None] = []
    for _ in range(mesh.ndim):
        dims.append(_choose(mesh, dims, *operands))
        targets.append(_placements(dims[-1], tensors))
    advice = (
        "attention and are redistributed to {wanted}; shard batch or heads, or a sequence by "
        "scaledot.distributed.context_parallel_attention"
    )
    placed = with_placements(tensors, targets, mesh, advice)
    if "dropout_seed" in placed:
        batch, head = _origin(query.shape, dims, mesh)
        heads = query.shape[-3] if query.dim() > 2 else 1
        lower_right = arguments.get("causal_alignment") == "lower_right"
        placed["part"] = [key.shape[-2] - query.shape[-2] if lower_right else 0, 0, 0, batch, head, heads]
    query, key, value = (placed.pop(name) for name in ("query", "key", "value"))
    return query, key, value, {**arguments, **placed}


def _choose(mesh: DeviceMesh, before: Sequence[int | None], *tensors: DTensor) -> int | None:
    """The dimension, counted from the last, that the next dimension of the mesh shards.

    It is the one along which a tensor is sharded there already, if the rules allow it. `before`: what the earlier
    dimensions of the mesh shard.
    """
    k = len(before)
    for tensor in tensors:
        placement = tensor.placements[k]
        if not isinstance(placement, Shard):
            continue
        dim = placement.dim - tensor.dim()
        share = mesh.size(k)
        for m, earlier in enumerate(before):
            share *= mesh.size(m) if earlier == dim else 1
        query, key, value = (t.shape for t in tensors)
        if dim in _candidates(query, key, value, [share]):
            return dim
    return None


def _origin(shape: Sequence[int], dims: Sequence[int | None], mesh: DeviceMesh) -> tuple[int, int]:
    """The numbers of this rank's first batch entry and first head."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    lengths, first = list(shape), [0] * len(shape)
    for dim, size, k in zip(dims, mesh.shape, coordinate, strict=True):
        if dim is not None:
            chunk = -(-lengths[dim] // size)  # DTensor cuts as torch.chunk does
            begin = min(k * chunk, lengths[dim])
            first[dim] += begin
            lengths[dim] = min(chunk, lengths[dim] - begin)
    batch = 0
    for dim, size in enumerate(shape[:-3]):
        batch = batch * size + first[dim]
    if any(dim is not None and dim < -3 and len(shape) + dim > 0 for dim in dims):
        raise ValueError(
            "dropout_p: with several batch dimensions only the first one can be sharded, so that entries stay numbered "
            "in order"
        )
    return batch, first[-3] if len(shape) > 2 else 0
