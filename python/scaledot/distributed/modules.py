"""A MultiHeadAttention whose heads are sharded over the ranks of a mesh."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .._checks import described
from .._keywords import check_keywords
from ..modules import MultiHeadAttention
from .placement import check_mesh

__all__ = ["tensor_parallel"]


@check_keywords
def tensor_parallel(module: MultiHeadAttention, mesh: DeviceMesh) -> MultiHeadAttention:
    """Shards the heads of a :class:`scaledot.MultiHeadAttention` over a 1-D mesh, in place, and returns it.

    It uses torch's parallelize_module: q_proj, k_proj and v_proj column-wise, out_proj row-wise (Megatron-LM: Shoeybi
    et al., 2019). Inputs and output are plain tensors, the same on every rank. Weights, if asked for, are a DTensor
    sharded by head. With dropout the module drops the weights that one process drops from the first rank's seed.

    Args:
        module: num_heads and num_kv_heads have to be multiples of the number of ranks.
        mesh: of one dimension; of a larger one take ``mesh["tp"]``.

    Raises:
        ValueError: heads or key and value heads that the ranks do not divide; a mesh that is not 1-D.
        TypeError: another module, or something else than a mesh.

    Example:
        >>> mesh = init_device_mesh("cpu", (2,))                           # on each of two processes
        >>> attention = scaledot.MultiHeadAttention(512, 8)
        >>> attention = scaledot.distributed.tensor_parallel(attention, mesh)
    """
    if not isinstance(module, MultiHeadAttention):
        raise TypeError(f"module: got {described(module)}; needs a scaledot.MultiHeadAttention")
    check_mesh(mesh)
    if mesh.ndim != 1:
        raise ValueError(f"mesh: got {mesh.ndim} dimensions; needs 1 (of a larger one take mesh['tp'])")
    for name, heads in (("num_heads", module.num_heads), ("num_kv_heads", module.num_kv_heads)):
        if heads % mesh.size():
            raise ValueError(f"{name}: got {heads}; tensor_parallel over {mesh.size()} ranks needs a multiple of that")
    plan: dict[str, Any] = {name: ColwiseParallel(use_local_output=False) for name in ("q_proj", "k_proj", "v_proj")}
    if module.out_proj is not None:
        plan["out_proj"] = RowwiseParallel()
    parallel: nn.Module = parallelize_module(module, mesh, plan)
    assert isinstance(parallel, MultiHeadAttention)
    return parallel
