"""The numerics rule of the Python tests: that of `scaledot.compare`, with three refinements.

- The largest of some hundred rounding errors depends on luck; in one draw, eager may be nearly exact. So eager's error
  is the largest over several draws of the case (oracle.py), both absolute and relative to the scale of the result.
  The scale of one draw may be small because terms happen to cancel.
- The oracle of float64 has itself the error of eager, which is allowed once more.
- Where all terms cancel, the scale is that of the terms. This happens where the exact gradient is 0, and where no row
  has two live keys: the softmax over one key is 1, and of dS = P * (dP - rowsum(P * dP) + dlse) only dlse remains.
  The caller passes the magnitude of the terms as `terms`.

docs/numerics.md says why, and who uses which rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scaledot.compare import numerics
from scaledot.compare.numerics import largest


def error(result: Tensor, oracle: Tensor) -> float:
    """The largest error at the positions where both are finite."""
    difference = result.detach().double() - oracle.detach().double()
    return largest(difference)


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
    of_oracle = eager_error if dtype == torch.float64 else 0.0
    return numerics.limit(eager_error, scale, dtype, gradient=gradient) + of_oracle


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
