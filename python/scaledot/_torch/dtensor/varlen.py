"""How DTensor may shard packed sequences: by head, or not at all.

                query, output   lse        key, value                       a gradient of key, value
heads           Shard(1)        Shard(0)   Shard(-2), if ranks divide them  Shard(-2)
heads, one      Shard(1)        Shard(0)   Replicate                        Partial
KV head
                Replicate       Replicate  Replicate                        Replicate

The bounds, lengths and pages of the sequences are the same on every rank. Sequences are not sharded: ranks with
different sequences need no DTensor. With dropout nothing is sharded, because dropout counts from the first head.

Importing this module registers the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ..._load import OPS
from ..inputs import VARLEN_DIFFERENTIABLE, VARLEN_INPUTS
from .rules import Sharding, operands_of, register_rule, with_placements

__all__ = ["place"]


# ------------------------------------------------------------------------------------------------------------ the rules
def _divides(query: Sequence[int], key: Sequence[int], value: Sequence[int], size: int) -> bool:
    """Whether each of `size` ranks gets heads, and the KV heads that they read."""
    if len(query) != 3 or min(len(key), len(value)) < 3:
        return False  # the op refuses it
    heads, kv_heads = query[1], (key[-2], value[-2])
    return heads % size == 0 and all(n % size == 0 or n == 1 for n in kv_heads)


def _placements(by_head: bool, tensors: Mapping[str, Any]) -> dict[str, Placement]:
    """The placements of the inputs that are not None."""
    found: dict[str, Placement] = {}
    for name in VARLEN_INPUTS:
        if tensors[name] is None:
            continue
        shape = tensors[name].shape
        placement: Placement = Replicate()
        if by_head and name == "query":
            placement = Shard(1)
        elif by_head and name in ("key", "value") and shape[-2] != 1:
            placement = Shard(len(shape) - 2)
        elif by_head and name == "alibi_slopes" and shape[-1] != 1:
            placement = Shard(len(shape) - 1)
        elif by_head and name == "relative_bias" and len(shape) > 1 and shape[-2] != 1:
            placement = Shard(len(shape) - 2)
        elif by_head and name in ("k_scale", "v_scale") and shape and shape[-1] != 1:
            placement = Shard(len(shape) - 1)
        elif by_head and name == "attn_mask" and len(shape) == 3 and shape[0] != 1:
            placement = Shard(0)
        found[name] = placement
    return found


def _choices(arguments: Mapping[str, Any]) -> list[bool]:
    """Whether heads are sharded, in each rule."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    by_head = arguments["dropout_p"] == 0 and any(
        _divides(query.shape, key.shape, value.shape, size) for size in query.mesh.shape
    )
    return [False, True] if by_head else [False]


def _results(by_head: bool) -> dict[str, Placement]:
    return {"output": Shard(1), "lse": Shard(0)} if by_head else {"output": Replicate(), "lse": Replicate()}


def _varlen(arguments: Mapping[str, Any]) -> list[Sharding]:
    return [
        ([*_results(by_head).values()], list(_placements(by_head, arguments).values()))
        for by_head in _choices(arguments)
    ]


def _varlen_recorded(arguments: Mapping[str, Any]) -> list[Sharding]:
    saves = arguments["save_output_low"]
    return [([*results, results[0] if saves else Replicate()], inputs) for results, inputs in _varlen(arguments)]


def _varlen_backward(arguments: Mapping[str, Any]) -> list[Sharding]:
    found = []
    for by_head in _choices(arguments):
        inputs, results = _placements(by_head, arguments), _results(by_head)
        known = (
            inputs
            | results
            | {"saved": results["output"]}
            | {f"grad_{name}": placement for name, placement in results.items()}
        )
        gradients: list[Placement] = []
        for wanted, name in zip(arguments["output_mask"], VARLEN_DIFFERENTIABLE, strict=True):
            own = inputs.get(name, Replicate())
            summed = wanted and by_head and isinstance(own, Replicate)
            gradients.append(Partial() if summed else own if wanted else Replicate())
        placements = [known[name] for name, argument in arguments.items() if hasattr(argument, "placements")]
        found.append((gradients, placements))
    return found


register_rule(OPS.varlen.default, _varlen)
register_rule(OPS.varlen_recorded.default, _varlen_recorded)
register_rule(OPS.varlen_backward.default, _varlen_backward)


# ----------------------------------------------------------------------------------------- varlen_attention on DTensors
def place(
    query: Tensor, key: Tensor, value: Tensor, arguments: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """The op's arguments with all tensors as DTensors, placed as one of the rules needs them.

    The tensors that describe the sequences may be plain; they have to be the same on every rank. A plain dropout
    seed is taken from the first rank.
    """
    operands = operands_of(query, key, value)
    mesh = operands[0].device_mesh
    dropout = bool(arguments.get("dropout_p"))
    size, by_head = 1, []
    for k, placement in enumerate(operands[0].placements):
        size *= mesh.size(k) if placement == Shard(1) else 1
        by_head.append(placement == Shard(1) and not dropout and _divides(query.shape, key.shape, value.shape, size))
    tensors = {name: arguments.get(name) for name in VARLEN_INPUTS} | {"query": query, "key": key, "value": value}
    targets = [_placements(fits, tensors) for fits in by_head]
    advice = (
        "packed sequences and are redistributed to {wanted}; shard heads, or give each rank separate sequences in "
        "plain tensors"
    )
    placed = with_placements(tensors, targets, mesh, advice)
    query, key, value = (placed.pop(name) for name in ("query", "key", "value"))
    return query, key, value, {**arguments, **placed}
