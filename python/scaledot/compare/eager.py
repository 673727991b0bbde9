"""Attention in plain torch operations: the peer where F.sdpa lacks an option, and the numerics rule's yardstick."""

from __future__ import annotations

import math

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
    dropout_p: float = 0.0,
    keep: Tensor | None = None,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """matmul, softmax, matmul in the inputs' dtype.

    Args:
        query, key, value: as for :func:`scaledot.scaled_dot_product_attention`, four-dimensional.
        masked: bool, True = may not attend; broadcasts to (B, H, Lq, Lk).
        bias: what is added to the scores.
        keep: the weights that dropout keeps; without it they are drawn.
    """
    if key.size(-3) != query.size(-3):
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = (query @ key.mT) * (1 / math.sqrt(query.size(-1)))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
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
