"""Attention on DTensors: how DTensor may shard the ops.

`sdpa` and `varlen` load torch.distributed.tensor, which takes about a second. They are imported with
scaledot.distributed, or when the first DTensor arrives.
"""

from __future__ import annotations

import sys

from torch import Tensor

__all__ = ["any_dtensor"]


def any_dtensor(*tensors: Tensor) -> bool:
    """Whether any is a DTensor. It does not import DTensor: while that is not imported, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(t, module.DTensor) for t in tensors)
