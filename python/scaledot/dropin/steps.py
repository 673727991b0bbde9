"""Scaled dot-product attention as a function, its single steps, and variants::

    scores  = Q K^T / sqrt(d_k), and -1e9 where mask == 0
    weights = softmax(scores)
    output  = weights V

In every function, Q is (..., Lq, d_k), K is (..., Lk, d_k) and V is (..., Lk, d_v). Leading dimensions broadcast as in
torch.matmul. A `mask` of any dtype broadcasts with the scores (..., Lq, Lk): 0 or False means "do not attend". A masked
score is -1e9, so a fully masked row gives the mean of all values.

The functions replace those of two notes on scaled dot-product attention. The source tree has their code as
tests/documents/steps.py and tests/documents/function.py.

Differences from the reference code:

- The functions from Q, K and V to an output run in a fused kernel; `robust_attention` only for its weights. The single
  steps, `compute_attention_scores` to `apply_attention_weights`, work on scores and weights in memory, as taught.
- A softmax over a row of -inf gives zeros. The reference gives NaN.
- A mask works in float16 too, where the reference raises an error because -1e9 overflows.
- `memory_efficient_attention` needs little memory whatever `chunk_size` is.
- An nn.Dropout is computed inside the kernel, so it drops other weights than the reference after the same manual_seed.
- `visualize_attention` finds a font for Chinese labels.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from .._checks import as_integer, described, integer, number, require_tensors
from .._keywords import check_keywords
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


def _masked_score() -> float:
    """A function, because torch.compile with dynamic=True makes a graph input of a float in a variable."""
    return -1e9


# ------------------------------------------------------------------------------------------------------ single steps


@check_keywords
def compute_attention_scores(Q: Tensor, K: Tensor) -> Tensor:
    """The scores Q K^T, (..., Lq, Lk), from Q (..., Lq, d_k) and K (..., Lk, d_k)."""
    require_tensors(Q=Q, K=K)
    return torch.matmul(Q, K.transpose(-2, -1))


@check_keywords
def scale_attention_scores(scores: Tensor, d_k: int) -> Tensor:
    """The scaled scores, scores / sqrt(d_k)."""
    require_tensors(scores=scores)
    return scores / math.sqrt(number("d_k", d_k))


@check_keywords
def apply_mask(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """The masked scores: -1e9 where the mask is 0 or False, elsewhere the score."""
    _check_tensors(mask, scores=scores)
    return scores if mask is None else scores.masked_fill(mask == 0, _masked_score())


@check_keywords
def compute_attention_weights(scores: Tensor) -> Tensor:
    """The weights: the softmax of the scores over the last dimension. A row of -inf gives zeros."""
    require_tensors(scores=scores)
    empty = torch.isneginf(scores).all(dim=-1, keepdim=True)
    return torch.softmax(scores.masked_fill(empty, 0), dim=-1).masked_fill(empty, 0)


@check_keywords
def stable_softmax(scores: Tensor) -> Tensor:
    """The softmax over the last dimension, exp(scores - max) / sum(exp(scores - max)). A row of -inf gives zeros.

    The maximum cancels, but its gradient stays, for precision: the gradient of a row's largest score is then the
    negative sum of the others' gradients, and not a small difference.
    """
    require_tensors(scores=scores)
    maximum = scores.amax(dim=-1, keepdim=True)
    exp_scores = torch.exp(scores - maximum.masked_fill(torch.isneginf(maximum), 0))
    total = exp_scores.sum(dim=-1, keepdim=True)
    return exp_scores / total.masked_fill(total == 0, 1)


@check_keywords
def apply_attention_weights(attention_weights: Tensor, V: Tensor) -> Tensor:
    """The output attention_weights V, (..., Lq, d_v), from weights (..., Lq, Lk) and V (..., Lk, d_v)."""
    require_tensors(attention_weights=attention_weights, V=V)
    return torch.matmul(attention_weights, V)


# -------------------------------------------------------------------------------------------------- whole attention


@check_keywords
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention with its weights.

    Args:
        query: (..., Lq, d_k).
        key: (..., Lk, d_k).
        value: (..., Lk, d_v).
        mask: broadcasts with (..., Lq, Lk); 0 or False: do not attend.

    Returns:
        (output (..., Lq, d_v), weights (..., Lq, Lk)).

    Raises:
        ValueError: shapes do not fit.

    Example:
        >>> q, k, v = torch.randn(3, 2, 4, 5, 8)
        >>> output, weights = scaledot.dropin.steps.scaled_dot_product_attention(q, k, v, torch.ones(5, 5).tril())
        >>> output.shape, weights.shape
        (torch.Size([2, 4, 5, 8]), torch.Size([2, 4, 5, 5]))
    """
    _check_tensors(mask, query=query, key=key, value=value)
    return optimized_scaled_dot_product_attention(query, key, value, mask)


@check_keywords
def optimized_scaled_dot_product_attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    mask: Tensor | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention with its weights and optional dropout.

    Args:
        Q: (..., Lq, d_k).
        K: (..., Lk, d_k).
        V: (..., Lk, d_v).
        mask: broadcasts with (..., Lq, Lk); 0 or False: do not attend.
        dropout: an nn.Dropout, which the kernel computes (nothing in eval mode), or any function of the weights, which
            is called.

    Returns:
        (output (..., Lq, d_v), weights (..., Lq, Lk) after dropout).

    Raises:
        ValueError: shapes do not fit.
    """
    _check_tensors(mask, Q=Q, K=K, V=V)
    if dropout is not None and not callable(dropout):
        raise TypeError(f"dropout: got {described(dropout)}; needs an nn.Dropout, a function of the weights, or None")
    output, weights = attend(Q, K, V, attended(mask), masked_score=_masked_score(), dropout=dropout)
    assert weights is not None
    return output, weights


@check_keywords
def robust_attention(
    Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None, eps: float = 1e-8
) -> tuple[Tensor, Tensor]:
    """Attention whose weights are (w + eps) / sum(w + eps) of the softmax's weights w, masked weights included.

    Args:
        Q: (..., Lq, d_k).
        K: (..., Lk, d_k).
        V: (..., Lk, d_v).
        mask: broadcasts with (..., Lq, Lk); 0 or False: do not attend.
        eps: added to every weight.

    Returns:
        (output (..., Lq, d_v), weights (..., Lq, Lk)).

    Raises:
        ValueError: shapes do not fit.
    """
    _check_tensors(mask, Q=Q, K=K, V=V)
    weights = attention_weights(Q, K, attended(mask), masked_score=_masked_score()) + number("eps", eps)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return torch.matmul(weights, V), weights


@check_keywords
def memory_efficient_attention(Q: Tensor, K: Tensor, V: Tensor, chunk_size: int = 512) -> Tensor:
    """Attention for at most `chunk_size` queries at a time.

    scaledot's fast kernels hold only a tile of the scores, whatever `chunk_size` is. The argument bounds the memory of
    the reference kernel, which holds all scores of a call.

    Args:
        Q: (B, H, Lq, d_k).
        K: (..., Lk, d_k).
        V: (..., Lk, d_v), where d_v is d_k or 1. With 1, the column is repeated.
        chunk_size: queries per call of the kernel, at least 1.

    Returns:
        The output, of Q's shape.

    Raises:
        ValueError: Q is not 4-D, `chunk_size` is below 1, or the output does not have Q's shape.
    """
    require_tensors(Q=Q, K=K, V=V)
    chunk_size = integer("chunk_size", chunk_size)
    if Q.dim() != 4:
        raise ValueError(f"Q: got shape {tuple(Q.shape)}; needs (B, H, Lq, d_k)")
    if chunk_size < 1:
        raise ValueError(f"chunk_size: got {chunk_size}; needs at least 1")
    starts = range(0, max(Q.size(2), 1), chunk_size)
    chunks = [_fused(Q[:, :, start : start + chunk_size, :], K, V) for start in starts]
    output = torch.cat(chunks, dim=2) if len(chunks) > 1 else chunks[0]
    if output.shape == Q.shape:
        return output
    if output.shape == (*Q.shape[:-1], 1):
        return output.expand_as(Q)
    raise ValueError(
        f"K and V: got shapes {tuple(K.shape)} and {tuple(V.shape)}; needs shapes for which the output has Q's shape "
        f"{tuple(Q.shape)}, not {tuple(output.shape)}"
    )


@check_keywords
def fused_attention(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention without its weights, with the mask of torch.nn.functional.scaled_dot_product_attention.

    Args:
        Q: (..., Lq, d_k).
        K: (..., Lk, d_k).
        V: (..., Lk, d_v).
        mask: bool (True = may attend), or floating and added to the scaled scores. A floating mask of zeros and ones is
            added too.

    Returns:
        The output (..., Lq, d_v).
    """
    _check_tensors(mask, Q=Q, K=K, V=V)
    return _fused(Q, K, V, attn_mask=mask)


def _check_tensors(mask: Tensor | None, **tensors: Tensor) -> None:
    require_tensors(**tensors)
    if mask is not None:
        require_tensors(mask=mask)


# ------------------------------------------------------------------------------------------------------------- masks


@check_keywords
def create_causal_mask(seq_len: int) -> Tensor:
    """The causal mask (seq_len, seq_len) in the default dtype: 1 on and below the diagonal, 0 above."""
    length: int = integer("seq_len", seq_len, least=0)
    return torch.ones(length, length).tril()


@check_keywords
def create_padding_mask(seq_lengths: Sequence[int] | Tensor, max_len: int) -> Tensor:
    """The padding mask (B, max_len, max_len) in the default dtype: 1 where both positions are below the length.

    Args:
        seq_lengths: the length of each of the B sequences.
        max_len: the length to which the sequences are padded.

    Raises:
        TypeError: a length is not an integer.
        ValueError: a length is negative.
    """
    try:
        lengths = [as_integer(length) for length in seq_lengths]
    except TypeError:
        lengths = [None]
    if None in lengths:
        raise TypeError(f"seq_lengths: got {described(seq_lengths)}; needs a sequence or a tensor of integers")
    max_len = integer("max_len", max_len, least=0)
    if any(length < 0 for length in lengths):
        raise ValueError(f"seq_lengths: got {lengths}; needs lengths of at least 0")
    valid = torch.arange(max_len) < torch.tensor(lengths, dtype=torch.int64).unsqueeze(1)
    return (valid.unsqueeze(2) & valid.unsqueeze(1)).to(torch.get_default_dtype())


# -------------------------------------------------------------------------------------------------------------- plot


@check_keywords
def visualize_attention(attention_weights: Tensor, tokens: Iterable[str] | None = None) -> None:
    """Draws the weights as a heat map on a new figure and shows it. Needs matplotlib.

    Without a display nothing is shown. The figure stays pyplot's current figure, for example for ``plt.savefig``.

    Args:
        attention_weights: (n, n) or (1, n, n).
        tokens: n labels for both axes; default the positions.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the shape or the number of tokens does not fit.
    """
    from ..fonts import families_for
    from ..plot import attention_heatmap

    require_tensors(attention_weights=attention_weights)
    weights = attention_weights.squeeze(0)
    if weights.dim() != 2:
        raise ValueError(f"attention_weights: got shape {tuple(attention_weights.shape)}; needs (n, n) or (1, n, n)")
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
