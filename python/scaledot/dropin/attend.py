"""Attention with the semantics of hand-written PyTorch code, shared by the teaching drop-ins.

Such code computes the scores by torch.matmul, fills them where ``mask == 0``, and passes the weights through a dropout
module. Here the kernel takes the mask as it is. It also takes the dropout, if its own dropout is equivalent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..functional import scaled_dot_product_attention

Dropout = Callable[[Tensor], Tensor]


def attended(mask: Tensor | None) -> Tensor | None:
    """A bool mask (True = may attend) from a mask of any dtype in which 0 means "do not attend"."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    return mask != 0


def fused_probability(dropout: Dropout | None) -> float | None:
    """The kernel's dropout_p that is equivalent to calling `dropout` on the weights, or None if it must be called.

    It must be called if it is not an nn.Dropout, or if it has hooks.
    """
    if dropout is None:
        return 0.0
    if type(dropout) is not nn.Dropout or dropout._forward_hooks or dropout._forward_pre_hooks:
        return None
    if dropout._backward_hooks or dropout._backward_pre_hooks:
        return None
    return float(dropout.p) if dropout.training else 0.0


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
    """Attention whose leading dimensions broadcast as in torch.matmul.

    Args:
        query: (..., Lq, D).
        key: (..., Lk, D).
        value: (..., Lk, Dv).
        attn_mask: bool (True = may attend), or floating and added to the scaled scores. It broadcasts with the scores
            in both directions, as in masked_fill: a mask with more dimensions than the scores enlarges the result.
        scale: default 1 / sqrt(D).
        masked_score: the score where a bool mask is False.
        dropout: applied to the weights.
        need_weights: whether to return the weights.

    Returns:
        (output (..., Lq, Dv), weights (..., Lq, Lk) after dropout or None).
    """
    query, batch = _enlarged(query, key, attn_mask)
    # If value has batch dimensions that the scores lack, they must share the weights and their dropout.
    shared = _broadcast("batch dimensions of scores and value", batch, value.shape[:-2]) == batch
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
    """Only the weights (..., Lq, Lk), computed with a value of width 0. The arguments are those of `attend`."""
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
    """(query, batch dimensions of the scores). If the mask is larger than the scores, the query is an expanded view."""
    scores = _broadcast("query and key", (*query.shape[:-1], 1), (*key.shape[:-2], 1, key.size(-2)))
    if attn_mask is not None:
        masked = _broadcast("scores and mask", scores, attn_mask.shape)
        if masked != scores:
            query, scores = query.expand(*masked[:-1], query.size(-1)), masked
    return query, scores[:-2]


def _broadcast(what: str, *shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape to which the shapes broadcast; `what` names their tensors in the error."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError as error:
        listed = " and ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"{what}: got shapes {listed}; needs shapes that broadcast") from error
