"""What each process runs in tests of scaledot.distributed; ranks.py starts the processes."""

from __future__ import annotations

import functools
import math
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cases import Case
from scaledot.distributed import attention, context_parallel_attention, measure, shard, unshard

RING, ALL, BOTH = "ring", "all_to_all", ("ring", "all_to_all")
Answer = dict[str, Any]


@functools.cache
def mesh_of(ranks: str) -> DeviceMesh:
    """A mesh of that shape, "4" or "2x2", of 1, 2 or 4 processes; those left of the four form further ones."""
    shape = tuple(map(int, ranks.split("x")))
    names = ("ring", "all")[: len(shape)]
    return init_device_mesh("cpu", (4 // math.prod(shape), *shape), mesh_dim_names=("others", *names))[names]


def arguments_of(case: Case) -> dict[str, Any]:
    """The case's options, for context_parallel_attention."""
    arguments = case.functional_arguments()
    del arguments["return_weights"], arguments["masked_score"]
    return arguments


def solve(case: Case, ranks: str, method: Any, placement: str) -> Answer:
    """Output, lse and gradients of a sharded case, as whole tensors, and the bytes that this rank sent."""
    mesh, inputs, cotangents = mesh_of(ranks), case.make(), case.cotangents()

    def cut(tensor: Tensor, dim: int = 2) -> Tensor:
        return shard(tensor, mesh, dim, placement)  # type: ignore[arg-type]

    local = [cut(t).requires_grad_() for t in (inputs.query, inputs.key, inputs.value)]
    mask = None if inputs.attn_mask is None else cut(inputs.attn_mask[:, 0, 0], 1)
    seed = inputs.dropout_seed if inputs.dropout_seed is not None else torch.zeros(2, dtype=torch.int64)
    with measure() as traffic, mock.patch.object(attention, "draw_seed", return_value=seed):
        output, lse = context_parallel_attention(
            *local,
            mesh,
            method=method,
            placement=placement,
            key_mask=mask,
            alibi_slopes=inputs.alibi_slopes,
            return_lse=True,
            **arguments_of(case),
        )
        forward = dict(traffic.sent)
        assert cotangents.output is not None
        assert cotangents.lse is not None
        found = torch.autograd.grad([output, lse], local, [cut(cotangents.output), cut(cotangents.lse)])
    results = dict(zip(("output", "lse", "query", "key", "value"), (output, lse, *found), strict=True))
    whole = {name: unshard(t.detach(), mesh, 2, placement) for name, t in results.items()}  # type: ignore[arg-type]
    own_layout = output.transpose(1, 2).is_contiguous()
    return {"results": whole, "forward": forward, "sent": dict(traffic.sent), "layout": own_layout}
