"""How DTensor may shard the ops: by batch entry, by head, or not at all; and a MultiHeadAttention with sharded heads.

                          query, output, lse     key, value                       a gradient of key, value
batch (equal sizes)       Shard(d)               Shard(d)                         Shard(d)
heads                     Shard(-3)              Shard(-3), if ranks divide them  Shard(-3)
heads, one key head       Shard(-3)              Replicate                        Partial
                          Replicate              Replicate                        Replicate

Masks and slopes are sharded along the dimension if they have it and replicated if they broadcast over it; the gradient
of one that broadcasts is Partial. Anything else is redistributed by DTensor to one of these, which its CommDebugMode
and ExplicitRedistributionContext show, and scaled_dot_product_attention warns about.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ..modules import MultiHeadAttention

__all__ = ["tensor_parallel"]

_OPS = torch.ops.scaledot


# ------------------------------------------------------------------------------------------------------------ the rules
def _candidates(query: Sequence[int], key: Sequence[int], value: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The dimensions, counted from the last, along which shapes can be sharded by one of `sizes`; -3 is the heads'."""
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


def _along(shape: Sequence[int] | None, dim: int) -> Placement:
    """The placement of a tensor of `shape` where `dim`, counted from the last, is sharded; None: there is no tensor."""
    if shape is None or len(shape) < -dim or shape[dim] == 1:
        return Replicate()
    return Shard(len(shape) + dim)


def _along_heads(shape: Sequence[int] | None, dim: int) -> Placement:
    """The same for a tensor without rows and columns: alibi_slopes."""
    return Replicate() if shape is None else _along([*shape, 1, 1], dim)


def _placements(
    dim: int | None, query: Any, key: Any, value: Any, attn_mask: Any, alibi_slopes: Any, dropout_seed: Any
) -> list[Placement]:
    """Of the inputs that are there, where `dim` is sharded; None: nothing is."""
    tensors = [query, key, value, attn_mask, alibi_slopes, dropout_seed]
    if dim is None:
        return [Replicate() for t in tensors if t is not None]
    found = [_along(None if t is None else t.shape, dim) for t in tensors[:4]]
    found += [_along_heads(None if alibi_slopes is None else alibi_slopes.shape, dim), Replicate()]
    return [p for p, t in zip(found, tensors, strict=True) if t is not None]


def _dims(query: Any, key: Any, value: Any, dropout_p: float, part: Sequence[int]) -> list[int | None]:
    """Where dropout counts from is the caller's to say: without `part`, all of it has to be in one place."""
    if dropout_p > 0 and not part:
        return [None]
    return [None, *_candidates(query.shape, key.shape, value.shape, query.mesh.shape)]


def _sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    alibi_slopes: Any = None,
    dropout_seed: Any = None,
    dropout_p: float = 0.0,
    *rest: Any,
    return_weights: bool = False,
    average_weights: bool = False,
    part: Sequence[int] = (),
    **options: Any,
) -> list[Any]:
    names = [argument.name for argument in _OPS.sdpa.default._schema.arguments][7:]
    given = dict(zip(names, rest, strict=False))
    weights, part = given.get("return_weights", return_weights), given.get("part", part)
    average = given.get("average_weights", average_weights)
    found = []
    for dim in _dims(query, key, value, dropout_p, part):
        if average and dim == -3:
            continue  # the mean is over all heads
        inputs = _placements(dim, query, key, value, attn_mask, alibi_slopes, dropout_seed)
        rank = len(query.shape)
        output = Replicate() if dim is None else Shard(rank + dim)
        found.append(([output, output, output if weights else Replicate()], inputs))
    return found


def _sdpa_backward(
    grad_output: Any,
    grad_lse: Any,
    grad_weights: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    alibi_slopes: Any,
    dropout_seed: Any,
    output: Any,
    lse: Any,
    weights: Any,
    dropout_p: float,
    *rest: Any,
) -> list[Any]:
    part, output_mask = rest[10], rest[11]
    found = []
    for dim in _dims(query, key, value, dropout_p, part):
        inputs = _placements(dim, query, key, value, attn_mask, alibi_slopes, dropout_seed)
        result: Placement = Replicate() if dim is None else Shard(len(query.shape) + dim)
        gradients: list[Placement] = []
        for wanted, tensor in zip(output_mask, (query, key, value, attn_mask), strict=True):
            own = Replicate() if dim is None or tensor is None else _along(tensor.shape, dim)
            summed = wanted and dim is not None and isinstance(own, Replicate)
            gradients.append(Partial() if summed else own if wanted else Replicate())
        ahead: list[Placement] = [result for t in (grad_output, grad_lse, grad_weights) if t is not None]
        behind: list[Placement] = [result for t in (output, lse, weights) if t is not None]
        found.append((gradients, ahead + inputs + behind))
    return found


def _whole(results: int) -> Any:
    """Of ops that only tell positions and seeds apart, for double backward."""

    def rule(*arguments: Any, **options: Any) -> list[Any]:
        tensors = [a for a in (*arguments, *options.values()) if hasattr(a, "placements")]
        return [([Replicate()] * results, [Replicate()] * len(tensors))]

    return rule


def register_rule(op: Any, rule: Any, first: int) -> None:
    """`first`: the op's first argument that is no tensor."""
    register_sharding(op)(rule)
    # What rules and shapes depend on besides tensors, so that DTensor does not take one call's answer for another's.
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = RuntimeSchemaInfo(first, needs_pytree=True)


def _register() -> None:
    rules = [(_OPS.sdpa.default, _sdpa, 6), (_OPS.sdpa_backward.default, _sdpa_backward, 12)]
    rules += [(_OPS.sdpa_mask.default, _whole(2), 3), (_OPS.dropout_mask.default, _whole(1), 1)]
    for op, rule, first in rules:
        register_rule(op, rule, first)


_register()


# --------------------------------------------------------------------------- scaled_dot_product_attention on DTensors
def operands_of(query: Tensor | None, key: Tensor | None, value: Tensor | None) -> list[DTensor]:
    """The three, which have to be DTensors if one of them is."""
    operands: list[DTensor] = []
    for name, operand in (("query", query), ("key", key), ("value", value)):
        if not isinstance(operand, DTensor):
            raise TypeError(
                f"{name}: got a plain tensor among DTensors; needs a DTensor (DTensor.from_local, distribute_tensor)"
            )
        operands.append(operand)
    return operands


def whole_on(mesh: DeviceMesh, name: str, tensor: Tensor) -> DTensor:
    """A plain tensor that is the same on every rank; of dropout_seed the first rank's counts."""
    plain = [Replicate()] * mesh.ndim
    if name == "dropout_seed":
        return distribute_tensor(tensor.to(mesh.device_type), mesh, plain)
    return DTensor.from_local(tensor, mesh, plain, run_check=False)


def on_dtensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_seed: Tensor | None,
    lower_right: bool,
) -> tuple[list[Tensor | None], list[int]]:
    """The op's first six arguments as DTensors, placed as one of the rules wants them, and the op's `part`.

    A plain mask, slopes or seed are taken to be whole, and the first rank's seed counts. With dropout `part` says which
    batch entries and heads are here, so that the same weights are dropped as one process drops.
    """
    operands = operands_of(query, key, value)
    mesh = operands[0].device_mesh
    tensors = {
        "query": query, "key": key, "value": value,
        "attn_mask": attn_mask, "alibi_slopes": alibi_slopes, "dropout_seed": dropout_seed,
    }  # fmt: skip
    targets: list[list[Placement]] = []
    dims: list[int | None] = []
    for _ in range(mesh.ndim):
        dims.append(_choose(mesh, dims, *operands))
        there = iter(_placements(dims[-1], *tensors.values()))
        targets.append([Replicate() if t is None else next(there) for t in tensors.values()])
    placed: list[Tensor | None] = []
    for number, (name, tensor) in enumerate(tensors.items()):
        wanted = tuple(target[number] for target in targets)
        if tensor is None:
            placed.append(None)
        elif not isinstance(tensor, DTensor):
            placed.append(whole_on(mesh, name, tensor).redistribute(placements=wanted))
        else:
            if tensor.placements != wanted and number < 3:
                warnings.warn(
                    f"{name}: placements {tensor.placements} do not suit attention and are redistributed to {wanted}; "
                    "shard batch or heads, or a sequence by scaledot.distributed.context_parallel_attention",
                    stacklevel=4,
                )
            placed.append(tensor.redistribute(placements=wanted))
    part: list[int] = []
    if dropout_seed is not None:
        batch, head = _origin(query.shape, dims, mesh)
        heads = query.shape[-3] if query.dim() > 2 else 1
        part = [key.shape[-2] - query.shape[-2] if lower_right else 0, 0, 0, batch, head, heads]
    return placed, part


def _choose(mesh: DeviceMesh, before: Sequence[int | None], *tensors: DTensor) -> int | None:
    """Which dimension, counted from the last, the mesh's next dimension shards: the one that a tensor has there
    already, if it can be. `before`: what the mesh's earlier dimensions shard."""
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


# --------------------------------------------------------------------------------------------- tensor-parallel modules
def tensor_parallel(module: MultiHeadAttention, mesh: DeviceMesh) -> MultiHeadAttention:
    """Shards the heads of a :class:`scaledot.MultiHeadAttention` over a 1-D mesh, in place, and returns it.

    By torch's own parallelize_module: q_proj, k_proj and v_proj column-wise, out_proj row-wise (Megatron-LM: Shoeybi et
    al., 2019). Inputs and output are plain tensors, the same on every rank; weights, if asked for, are a DTensor
    sharded by head. With dropout the same weights are dropped as one process drops from the first rank's seed.

    Raises:
        ValueError: heads or key and value heads that the ranks do not divide; a mesh that is not 1-D.
        TypeError: another module.
    """
    if not isinstance(module, MultiHeadAttention):
        raise TypeError(f"module: got a {type(module).__name__}; needs a scaledot.MultiHeadAttention")
    if mesh.ndim != 1:
        raise ValueError(f"mesh: got {mesh.ndim} dimensions; needs 1 (of a larger one take mesh['tp'])")
    for name, heads in (("num_heads", module.num_heads), ("num_kv_heads", module.num_kv_heads)):
        if heads % mesh.size():
            raise ValueError(f"{name}: got {heads}; tensor_parallel over {mesh.size()} ranks needs a multiple of that")
    plan: dict[str, Any] = {
        name: ColwiseParallel(use_local_output=False) for name in ("q_proj", "k_proj", "v_proj")
    }
    if module.out_proj is not None:
        plan["out_proj"] = RowwiseParallel()
    parallel: nn.Module = parallelize_module(module, mesh, plan)
    assert isinstance(parallel, MultiHeadAttention)
    return parallel
