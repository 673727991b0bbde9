"""Scaled dot-product attention as a function of query, key and value, the steps it consists of, and variants of it.

    scores = Q K^T / sqrt(d_k)      weights = softmax(scores, where mask == 0: -1e9)      output = weights V

In every function Q is (..., Lq, d_k), K (..., Lk, d_k) and V (..., Lk, d_v); leading dimensions broadcast as in
torch.matmul. A `mask` of any dtype broadcasts with the scores (..., Lq, Lk); where it is 0 or False the score
becomes -1e9, so that a row without a single key to attend to gives the mean of all values.

The single steps (`compute_attention_scores` to `apply_attention_weights`) work on scores and weights in memory, as
they are taught; everything that goes from Q, K and V to an output runs in one kernel.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..functional import scaled_dot_product_attention as _fused
from .attend import attend, attended, attention_weights

__all__ = [
    "apply_attention_weights",
    "apply_mask",
    "compute_attention_scores",
    "compute_attention_weights",
    "create_causal_mask",
    "create_padding_mask",
    "fused_attention",
    "memory_efficient_attention",
    "optimized_scaled_dot_product_attention",
    "robust_attention",
    "scale_attention_scores",
    "scaled_dot_product_attention",
    "stable_softmax",
    "visualize_attention",
]

MASKED_SCORE = -1e9


# ------------------------------------------------------------------------------------------------------ single
# steps


def compute_attention_scores(Q: Tensor, K: Tensor) -> Tensor:
    """Q K^T, of shape (..., Lq, Lk)."""
    return torch.matmul(Q, K.transpose(-2, -1))


def scale_attention_scores(scores: Tensor, d_k: int) -> Tensor:
    """scores / sqrt(d_k)"""
    return scores / math.sqrt(d_k)


def apply_mask(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """-1e9 where mask is 0 or False, else the score."""
    return scores if mask is None else scores.masked_fill(mask == 0, MASKED_SCORE)


def compute_attention_weights(scores: Tensor) -> Tensor:
    """softmax over the last dimension; a row of nothing but -inf gives zeros."""
    empty = torch.isneginf(scores).all(dim=-1, keepdim=True)
    return torch.softmax(scores.masked_fill(empty, 0), dim=-1).masked_fill(empty, 0)


def stable_softmax(scores: Tensor) -> Tensor:
    """exp(scores - max) / sum over the last dimension; a row of nothing but -inf gives zeros.

    The maximum cancels, but its gradient is not left out: it makes that of a row's largest score the sum of the
    others' instead of a small difference.
    """
    maximum = scores.amax(dim=-1, keepdim=True)
    exp_scores = torch.exp(scores - maximum.masked_fill(torch.isneginf(maximum), 0))
    total = exp_scores.sum(dim=-1, keepdim=True)
    return exp_scores / total.masked_fill(total == 0, 1)


def apply_attention_weights(attention_weights: Tensor, V: Tensor) -> Tensor:
    """attention_weights V, of shape (..., Lq, d_v)."""
    return torch.matmul(attention_weights, V)


# ---------------------------------------------------------------------------------------------------- whole
# attention


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(output (..., Lq, d_v), weights (..., Lq, Lk))"""
    return optimized_scaled_dot_product_attention(query, key, value, mask)


def optimized_scaled_dot_product_attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    mask: Tensor | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(output (..., Lq, d_v), weights (..., Lq, Lk) after dropout).

    dropout: an nn.Dropout, whose probability (0 in eval mode) is then the kernel's own; or anything that maps
    weights to weights, which is called.
    """
    output, weights = attend(Q, K, V, attended(mask), masked_score=MASKED_SCORE, dropout=dropout)
    assert weights is not None
    return output, weights


def robust_attention(
    Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None, eps: float = 1e-8
) -> tuple[Tensor, Tensor]:
    """(output, weights), where eps is added to every weight, masked ones too, before they are normalised again."""
    weights = attention_weights(Q, K, attended(mask), masked_score=MASKED_SCORE) + eps
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return torch.matmul(weights, V), weights


def memory_efficient_attention(Q: Tensor, K: Tensor, V: Tensor, chunk_size: int = 512) -> Tensor:
    """Output of Q's shape, for 4-dimensional Q (B, H, Lq, d_k), computed for at most chunk_size queries at a time.

    The kernels hold a tile of the scores at a time whatever chunk_size is; it bounds what a kernel that does
    materialise them (the float64 reference) holds. d_v must be d_k, or 1: then the one column is repeated.
    """
    if Q.dim() != 4:
        raise ValueError(f"Q needs 4 dimensions (batch, heads, length, d_k), got the shape {tuple(Q.shape)}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    starts = range(0, max(Q.size(2), 1), chunk_size)
    chunks = [_fused(Q[:, :, start : start + chunk_size, :], K, V) for start in starts]
    output = torch.cat(chunks, dim=2) if len(chunks) > 1 else chunks[0]
    if output.shape == Q.shape:
        return output
    if output.shape == (*Q.shape[:-1], 1):
        return output.expand_as(Q)
    raise ValueError(
        f"the output must fit Q's shape {tuple(Q.shape)}, but K {tuple(K.shape)} and V {tuple(V.shape)} "
        f"make it {tuple(output.shape)}"
    )


def fused_attention(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> Tensor:
    """The output alone. mask as in torch.nn.functional.scaled_dot_product_attention: bool, True = may attend; or of
    a floating dtype, and then it is added to the scaled scores (a mask of zeros and ones too)."""
    return _fused(Q, K, V, attn_mask=mask)


# -------------------------------------------------------------------------------------------------------------
# masks


def create_causal_mask(seq_len: int) -> Tensor:
    """(seq_len, seq_len) of ones on and below the diagonal and zeros above it, in the default dtype."""
    return torch.ones(seq_len, seq_len).tril()


def create_padding_mask(seq_lengths: Sequence[int] | Tensor, max_len: int) -> Tensor:
    """(batch, max_len, max_len) of ones where both positions are below the sequence's length, in the default
    dtype."""
    lengths = [operator.index(length) for length in seq_lengths]
    if any(length < 0 for length in lengths):
        raise ValueError(f"seq_lengths must not be negative, got {lengths}")
    valid = torch.arange(max_len) < torch.tensor(lengths, dtype=torch.int64).unsqueeze(1)
    return (valid.unsqueeze(2) & valid.unsqueeze(1)).to(torch.get_default_dtype())


# --------------------------------------------------------------------------------------------------------------
# plot


def visualize_attention(attention_weights: Tensor, tokens: Iterable[str] | None = None) -> None:
    """Draws the weights, (n, n) or (1, n, n), as a heat map on a new figure and shows it (needs matplotlib).

    tokens, n of them, label both axes; without them the positions do. Without a screen nothing is shown and the
    figure stays pyplot's current one, ready for plt.savefig.
    """
    from ..fonts import families_for
    from ..plot import attention_heatmap

    weights = attention_weights.squeeze(0)
    if weights.dim() != 2:
        raise ValueError(f"attention_weights needs the shape (n, n) or (1, n, n), got {tuple(attention_weights.shape)}")
    labels = None if tokens is None else list(tokens)
    axes = attention_heatmap(weights, query_tokens=labels, key_tokens=labels)
    title, x_label, y_label = "注意力权重矩阵", "Key位置", "Query位置"
    families = families_for([title, x_label, y_label])
    axes.set_title(title, fontfamily=families)
    axes.set_xlabel(x_label, fontfamily=families)
    axes.set_ylabel(y_label, fontfamily=families)

    from matplotlib import pyplot

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*non-interactive", category=UserWarning)
        pyplot.show()
