"""A compiled backward takes the dropout seed of its forward.

With torch._functorch.config.activation_memory_budget below 1, the partitioner computes parts of the forward again in
the backward, and random numbers among them: the backward would drop other weights. So the tensor that a call gets as
its seed is marked, when the call is traced, as one that has to be saved. A budget of 0 saves nothing at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._functorch import config
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_slot
from torch.utils.checkpoint import CheckpointPolicy

from .._load import OPS
from .schema import given

__all__: list[str] = []


def _trace(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    seed = given(func, args, kwargs).get("dropout_seed")
    if isinstance(seed, Tensor):
        slot = get_proxy_slot(seed, mode.tracer, None)
        if slot is not None:
            if config.activation_memory_budget == 0:
                raise RuntimeError(
                    "dropout_p: got torch._functorch.config.activation_memory_budget = 0, with which the backward "
                    "would drop other weights than the forward; needs a budget above 0, such as 0.01"
                )
            slot.proxy.node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return mode.__torch_dispatch__(func, types, args, kwargs)


for _op in (OPS.sdpa_recorded.default, OPS.varlen_recorded.default):
    torch.library.register_torch_dispatch(_op, ProxyTorchDispatchMode, _trace)
