"""merge_states: attention over two disjoint sets of keys, from the attention over each."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["merge_states"]


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    r"""The attention of a query over two disjoint sets of keys, given its attention over each set.

    ::

        lse = log(exp(lse_a) + exp(lse_b))
        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

    The rule is associative and commutative, so any number of parts can be merged in any order. It is the
    online softmax of Milakov and Gimelshein ("Online normalizer calculation for softmax", 2018), applied to
    attention by Rabe and Staats ("Self-attention does not need O(n^2) memory", 2021).

    Where a side has nothing to attend to (its lse is -inf) the result is the other side's, whatever is in
    that side's output; where both have nothing, it is 0 and -inf. Gradients are 0 there, never NaN.
    Differentiable any number of times.

    Args:
        out_a, out_b: (..., Lq, Dv), of one shape; any floating dtypes.
        lse_a, lse_b: (..., Lq), as `return_lse` gives them.

    Returns:
        (out, lse): out in the dtype of `out_a`; lse in float32, or float64 if any input is float64. Both are
        computed in the dtype of lse.

    Raises:
        TypeError: an argument is no floating tensor. ValueError: the shapes differ. RuntimeError: the devices
            differ.
    """
    _check(out_a, lse_a, out_b, lse_b)
    tensors = (out_a, lse_a, out_b, lse_b)
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    lse_a, lse_b = lse_a.to(dtype), lse_b.to(dtype)
    # Any shift gives the same result; the larger lse keeps exp in range. Being a constant, it needs no
    # gradient.
    largest = torch.maximum(lse_a, lse_b).detach()
    shift = torch.where(largest == -math.inf, 0.0, largest)
    mass_a, mass_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    mass = mass_a + mass_b
    empty = mass == 0
    mass = torch.where(empty, 1.0, mass)  # before log and division, whose gradients at 0 are not finite
    lse = torch.where(empty, -math.inf, shift + torch.log(mass))
    part_a = (mass_a / mass).unsqueeze(-1) * _only_live(out_a.to(dtype), lse_a)
    part_b = (mass_b / mass).unsqueeze(-1) * _only_live(out_b.to(dtype), lse_b)
    return (part_a + part_b).to(out_a.dtype), lse


def _only_live(out: Tensor, lse: Tensor) -> Tensor:
    return torch.where((lse == -math.inf).unsqueeze(-1), 0.0, out)


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = f"dtype {tensor.dtype}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise TypeError(f"{name}: got {got}; needs a floating tensor")
        if tensor.device != out_a.device:
            raise RuntimeError(f"{name}: got a tensor on {tensor.device}; needs {out_a.device}, where out_a is")
    if out_a.dim() == 0:
        raise ValueError("out_a: got a tensor without dimensions; needs the shape (..., Lq, Dv)")
    if out_b.shape != out_a.shape:
        raise ValueError(f"out_b: got shape {tuple(out_b.shape)}; needs {tuple(out_a.shape)}, that of out_a")
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.shape != out_a.shape[:-1]:
            raise ValueError(
                f"{name}: got shape {tuple(lse.shape)}; needs {tuple(out_a.shape[:-1])}, "
                f"that of out_a without its last dimension"
            )
