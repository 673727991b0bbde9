"""Code that the rules of all ops share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from ..._checks import require_tensors
from ..._warn import warn
from .. import schema

__all__ = ["Sharding", "operands_of", "register_rule", "replicated", "with_placements"]

# One way to shard a call: the placements of the op's results, and those of the tensors that it is given.
Sharding = tuple[list[Placement], list[Placement]]


def register_rule(op: Any, rule: Callable[[Mapping[str, Any]], list[Sharding]]) -> None:
    """`rule` gets all arguments of the op by name, and returns the ways in which DTensor may shard it."""

    def of_arguments(*args: Any, **kwargs: Any) -> list[Sharding]:
        return rule(schema.arguments(op, args, kwargs))

    register_sharding(op)(of_arguments)
    # The answers also depend on the arguments that are not tensors: DTensor must not reuse one for other arguments.
    static = RuntimeSchemaInfo(schema.tensors_first(op), needs_pytree=True)
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = static


def replicated(arguments: Mapping[str, Any], results: int) -> Sharding:
    """Nothing is sharded."""
    tensors = [a for a in arguments.values() if hasattr(a, "placements")]
    return [Replicate()] * results, [Replicate()] * len(tensors)


def operands_of(query: Tensor, key: Tensor, value: Tensor) -> list[DTensor]:
    """The three tensors. If one is a DTensor all have to be."""
    operands: list[DTensor] = []
    for name, operand in (("query", query), ("key", key), ("value", value)):
        if not isinstance(operand, DTensor):
            raise TypeError(
                f"{name}: got a plain tensor among DTensors; needs a DTensor (DTensor.from_local, distribute_tensor)"
            )
        operands.append(operand)
    return operands


def with_placements(
    tensors: Mapping[str, Tensor | None], targets: Sequence[Mapping[str, Placement]], mesh: DeviceMesh, advice: str
) -> dict[str, Any]:
    """The tensors that are there as DTensors, placed as `targets` says for each dimension of the mesh.

    A query, key or value that has to be redistributed for it gets a warning that ends with `advice`.
    """
    placed: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        require_tensors(**{name: tensor})
        wanted = tuple(target[name] for target in targets)
        if not isinstance(tensor, DTensor):
            tensor = _replicated_on(mesh, name, tensor)
        elif tensor.placements != wanted and name in ("query", "key", "value"):
            warn(f"{name}: placements {tensor.placements} do not suit {advice.format(wanted=wanted)}")
        placed[name] = tensor.redistribute(placements=wanted)
    return placed


def _replicated_on(mesh: DeviceMesh, name: str, tensor: Tensor) -> DTensor:
    """A plain tensor that is the same on every rank, as a DTensor. dropout_seed is taken from the first rank."""
    placements = [Replicate()] * mesh.ndim
    if name == "dropout_seed":
        return distribute_tensor(tensor.to(mesh.device_type), mesh, placements)
    return DTensor.from_local(tensor, mesh, placements, run_check=False)
