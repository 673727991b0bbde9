"""The numerics rule of everything that is compared with eager torch: `compare`, and the Python tests.

The page docs/numerics.md of the repository says why, and who uses which rule.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

RESULT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
ULPS = 2.0


def largest(tensor: Tensor) -> float:
    """The largest finite magnitude; 0 if there is none."""
    sizes = tensor.detach().double().abs()
    if not sizes.numel():
        return 0.0
    most = float(sizes.max())
    if math.isfinite(most):
        return most
    finite = sizes[torch.isfinite(sizes)]
    return float(finite.max()) if finite.numel() else 0.0


def ulp(dtype: torch.dtype, scale: float) -> float:
    """The distance between neighbouring numbers of the dtype at this scale."""
    info = torch.finfo(dtype)
    return info.eps * max(2.0 ** math.floor(math.log2(scale)), info.smallest_normal) if scale > 0 else 0.0


def limit(eager_error: float, scale: float, dtype: torch.dtype, *, gradient: bool) -> float:
    """The largest error that the rule allows. `scale`: the largest magnitude of the exact result."""
    return (GRADIENT_FACTOR if gradient else RESULT_FACTOR) * eager_error + ULPS * ulp(dtype, scale)
