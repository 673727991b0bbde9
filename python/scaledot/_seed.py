"""The dropout seed of a call."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["draw_seed"]

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def draw_seed(query: Tensor | None = None) -> Tensor:
    """The dropout seed of one call, int64 of shape (2,).

    It is drawn from the default generator of query's GPU, without synchronising and safely under CUDA graphs, or
    otherwise from the CPU's.
    """
    device = query.device if query is not None and query.is_cuda else "cpu"
    return torch.randint(_INT64_MIN, _INT64_MAX, (2,), dtype=torch.int64, device=device)
