"""The numerics rule, in one place.

Its error against a float64 oracle may be at most 2 times (gradients: 3 times) the error of eager PyTorch in the same
dtype, plus 2 ulp of the result's scale. It must be non-finite exactly where the oracle is.

Details:
- The largest of some hundred rounding errors depends on luck; in one draw, eager may be nearly exact. So eager's error
  is the largest over several draws of the case (oracle.py), both absolute and relative to the scale of the result.
  The scale of one draw may be small because terms happen to cancel.
- float64: eager cannot be measured against an oracle of the same precision. Rounding errors are proportional to the
  unit roundoff, so eager's error in float32 times 2^-29 is used instead. The oracle has the same error, so the factor
  is one more.
- Where all terms cancel, the scale is that of the terms. This happens where the exact gradient is 0, and where no row
  has two live keys: the softmax over one key is 1, and of dS = P * (dP - rowsum(P * dP) + dlse) only dlse remains.
  The caller passes the magnitude of the terms as `terms`.
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


def error(result: Tensor, oracle: Tensor) -> float:
    """The largest error at the positions where both are finite."""
    difference = result.detach().double() - oracle.detach().double()
    return largest(difference)


def ulp(dtype: torch.dtype, scale: float) -> float:
    """The distance between neighbouring numbers of the dtype at this scale."""
    info = torch.finfo(dtype)
    return info.eps * max(2.0 ** math.floor(math.log2(scale)), info.smallest_normal) if scale > 0 else 0.0


def limit(
    oracle: Tensor,
    dtype: torch.dtype,
    eager_error: float,
    *,
    gradient: bool = False,
    terms: float = 0.0,
    cancels: bool = False,
) -> float:
    scale = largest(oracle)
    exactly_zero = scale < torch.finfo(torch.float64).eps * 16 * terms  # except for the rounding of the oracle
    if cancels or exactly_zero:
        scale = max(scale, terms)
    factor = GRADIENT_FACTOR if gradient else RESULT_FACTOR
    if dtype == torch.float64:
        factor += 1
    return factor * eager_error + ULPS * ulp(dtype, scale)


def kind(tensor: Tensor) -> Tensor:
    """0 where finite, 1 elsewhere."""
    return (~torch.isfinite(tensor.detach())).to(torch.int8)


def check(
    name: str,
    ours: Tensor,
    oracle: Tensor,
    eager_error: float,
    *,
    gradient: bool = False,
    terms: float = 0.0,
    cancels: bool = False,
) -> None:
    """Raises an AssertionError that names the worst element, unless `ours` obeys the rule."""
    assert ours.shape == oracle.shape, f"{name}: shape {tuple(ours.shape)}, the oracle's is {tuple(oracle.shape)}"
    wrong_kind = kind(ours) != kind(oracle)
    if wrong_kind.any():
        where = tuple(wrong_kind.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(wrong_kind.sum())} of {ours.numel()} elements are non-finite in only one of the "
            f"two, the first at {where}: ours {ours[where].item()}, oracle {oracle[where].item()}"
        )
    allowed = limit(oracle, ours.dtype, eager_error, gradient=gradient, terms=terms, cancels=cancels)
    found = error(ours, oracle)
    if not found <= allowed:
        difference = torch.nan_to_num((ours.detach().double() - oracle.double()).abs(), 0.0, 0.0, 0.0)
        where = tuple(int(k) for k in torch.unravel_index(difference.argmax(), difference.shape))
        raise AssertionError(
            f"{name}: error {found:.3e} is over the limit {allowed:.3e} (eager's error {eager_error:.3e}, "
            f"result's scale {largest(oracle):.3e}, {ours.dtype}); {int((difference > allowed).sum())} of "
            f"{ours.numel()} elements, the worst at {where}: ours {ours[where].item():.9g}, "
            f"oracle {oracle[where].item():.9g}"
        )
