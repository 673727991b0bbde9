"""Attention as hand-written PyTorch code calls it, for the modules beside this file.

Such code builds the scores with torch.matmul, fills them where `mask == 0`, and passes the weights through a
dropout module. Here the mask goes to the kernel as it is, and so does the dropout wherever the kernel's own does
the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..functional import scaled_dot_product_attention

Dropout = Callable[[Tensor], Tensor]


def attended(mask: Tensor | None) -> Tensor | None:
    """The bool mask (True = may attend) of a mask whose zeros, of any dtype, mean "do not attend"."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    return mask != 0


def fused_probability(dropout: Dropout | None) -> float | None:
    """The dropout_p that does to the weights what calling `dropout` would do.

    None where it has to be called: it is not an nn.Dropout, someone listens to it with hooks, or it drops everything
    (the kernels' dropout_p is below 1).
    """
    if dropout is None:
        return 0.0
    if type(dropout) is not nn.Dropout or dropout._forward_hooks or dropout._forward_pre_hooks:
        return None
    if dropout._backward_hooks or dropout._backward_pre_hooks:
        return None
    p = float(dropout.p) if dropout.training else 0.0
    return p if p < 1.0 else None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    masked_score: float = -math.inf,
    dropout: Dropout | None = None,
    need_weights: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """(output, weights): weights after dropout, or None unless `need_weights`.

    query (..., Lq, D), key (..., Lk, D), value (..., Lk, Dv); the leading dimensions broadcast as in torch.matmul.
    attn_mask: bool (True = may attend) or added to the scaled scores. It broadcasts with the scores both ways, as
    it does in masked_fill: a mask with more dimensions than the scores makes the result larger.
    """
    query, batch = _enlarged(query, key, attn_mask)
    # A value with batch dimensions that the scores lack must not enlarge the weights, nor draw dropout for each one.
    shared = _broadcast("the batch dimensions of the scores and of value", batch, value.shape[:-2]) == batch
    dropout_p = fused_probability(dropout)
    if dropout_p is not None and shared:
        result = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            scale=scale,
            masked_score=masked_score,
            return_weights=need_weights,
        )
        return result if need_weights else (result, None)
    weights = attention_weights(
        query, key, attn_mask, dropout_p=dropout_p or 0.0, scale=scale, masked_score=masked_score
    )
    if dropout is not None and dropout_p is None:
        weights = dropout(weights)
    return torch.matmul(weights, value), weights if need_weights else None


def attention_weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
    masked_score: float = -math.inf,
) -> Tensor:
    """The weights (..., Lq, Lk) alone: attention over a value without columns. Arguments as in `attend`."""
    query, _ = _enlarged(query, key, attn_mask)
    _, weights = scaled_dot_product_attention(
        query,
        key,
        key[..., :0],
        attn_mask,
        dropout_p=dropout_p,
        scale=scale,
        masked_score=masked_score,
        return_weights=True,
    )
    return weights


def _enlarged(query: Tensor, key: Tensor, attn_mask: Tensor | None) -> tuple[Tensor, tuple[int, ...]]:
    """(query, the scores' batch dimensions); the query is expanded, as a view, to a mask larger than the scores."""
    scores = _broadcast("query and key", (*query.shape[:-1], 1), (*key.shape[:-2], 1, key.size(-2)))
    if attn_mask is not None:
        masked = _broadcast("the scores and the mask", scores, attn_mask.shape)
        if masked != scores:
            query, scores = query.expand(*masked[:-1], query.size(-1)), masked
    return query, scores[:-2]


def _broadcast(what: str, *shapes: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError as error:
        listed = " and ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"{what} do not broadcast: got the shapes {listed}") from error
