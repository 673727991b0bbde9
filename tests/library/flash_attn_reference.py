"""Attention in flash-attn's conventions as its formula says, and flash-attn's rule for errors."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out (B, Lq, H, Dv), lse (B, H, Lq), weights (B, H, Lq, Lk)) of q (B, Lq, H, D), all in q's dtype."""
    groups = q.size(2) // k.size(2)
    query, key, value = (x.transpose(1, 2) for x in (q, *(x.repeat_interleave(groups, 2) for x in (k, v))))
    scores = query @ key.mT * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    distance = torch.arange(k.size(1)) - torch.arange(q.size(1))[:, None] - (k.size(1) - q.size(1))
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None].to(q.dtype) * distance.abs()
    left, right = (math.inf if side < 0 else side for side in window_size)
    attends = (distance >= -left) & (distance <= (min(right, 0) if causal else right))
    scores = scores.masked_fill(~attends, -math.inf)
    weights = torch.where(attends.any(-1, keepdim=True), scores, 0.0).softmax(-1) * attends
    return (weights @ value).transpose(1, 2), scores.logsumexp(-1), weights


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x (B, L, H, D) with each pair of dimensions turned as one complex number, by the angle at its position."""
    half = cos.size(-1)
    turns = torch.complex(cos.double(), sin.double())[positions.long()].unsqueeze(2)
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (
        slice(0, half), slice(half, 2 * half))  # fmt: skip
    turned = torch.complex(x[..., first].double(), x[..., second].double()) * turns
    result = x.clone()
    result[..., first], result[..., second] = turned.real.to(x.dtype), turned.imag.to(x.dtype)
    return result


def check(ours: Tensor, exact: Tensor, eager: Tensor) -> None:
    """At most twice the error of the same formula in the same dtype, plus 4 units in the last place of the scale."""
    assert ours.shape == exact.shape
    assert ours.dtype == eager.dtype
    error, yardstick = ((x.double() - exact).abs().max() for x in (ours, eager))
    floor = 4 * torch.finfo(ours.dtype).eps * max(1.0, float(exact.detach().abs().max()))
    assert error <= 2 * yardstick + floor, f"error {error:.3e}, that of the same precision {yardstick:.3e}"
