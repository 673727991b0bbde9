"""Attention in plain torch operations.

It is the peer where F.sdpa lacks an option. In float64 it is the oracle of the numerics rule, which allows errors in
proportion to its own in the dtype of a case.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masked: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    softcap: float | None = None,
    score_mod: Callable[[Tensor], Tensor] | None = None,
    dropout_p: float = 0.0,
    keep: Tensor | None = None,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(Q K^T / sqrt(d_k)) V by matmul, softmax, matmul, in the inputs' dtype.

    Args:
        query: (B, H, Lq, D).
        key: (B, Hkv, Lk, D), where Hkv divides H.
        value: (B, Hkv, Lk, Dv).
        masked: bool, broadcastable to (B, H, Lq, Lk); True = may not attend.
        bias: added to the scores; broadcastable to (B, H, Lq, Lk).
        softcap: if given, scores become softcap * tanh(scores / softcap).
        score_mod: if given, changes the matrix of scores.
        dropout_p: probability of dropping a weight.
        keep: bool (B, H, Lq, Lk), the weights that dropout keeps; drawn at random if None.
        return_weights: also return the weights (B, H, Lq, Lk).

    Returns:
        The output (B, H, Lq, Dv), or (output, weights).
    """
    if key.size(-3) != query.size(-3):
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = (query @ key.mT) * (1 / math.sqrt(query.size(-1)))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if score_mod is not None:
        scores = score_mod(scores)
    if bias is not None:
        scores = scores + bias
    if masked is not None:
        scores = scores.masked_fill(masked, -math.inf)
    weights = torch.softmax(scores, -1).to(value.dtype)
    if keep is not None:
        weights = weights * keep / (1 - dropout_p)
    elif dropout_p > 0:
        weights = F.dropout(weights, dropout_p)
    output = weights @ value
    return (output, weights) if return_weights else output
