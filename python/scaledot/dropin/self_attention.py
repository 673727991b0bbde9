"""Self-attention with separate key and value widths, the same with mask and dropout, and multi-head attention.

The three classes replace those of a notebook on attention. The source tree has its code as
tests/documents/self_attention.py.

Differences from the reference code:

- One fused kernel replaces matmul, masked_fill, softmax, dropout and matmul.
- A row with nothing to attend to has zero weights, so its output is the bias of output_proj. The reference gives NaN.
- `nn.Dropout` is computed inside the kernel, so it drops other weights than the reference after the same manual_seed.
  Any other dropout module is called, as in the reference.
- A head_num that does not divide d_model is an error in the constructor. The reference fails in the forward.
"""

from __future__ import annotations

import math
from operator import truediv

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .._checks import integer, number, require_tensors
from .._keywords import NoOptions, check_keywords, hide_unknown, unknown_keyword
from ..functional import scaled_dot_product_attention
from .attend import attend, attended

__all__ = ["MultiHeadAttention", "SelfAttention", "SelfAttentionV2"]


def _scale(d_k: int) -> tuple[int, int]:
    """1 / sqrt(d_k), where the root is rounded to float32 for every dtype, as in the reference code.

    As a fraction: torch.compile takes a module's ints as constants, but with dynamic=True makes inputs of its floats.
    """
    return (1.0 / float(torch.tensor(d_k, dtype=torch.float32, device="cpu").sqrt())).as_integer_ratio()


def _probability(rate: float) -> float:
    rate = number("dropout_rate", rate)
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"dropout_rate: got {rate}; needs a probability in [0, 1]")
    return rate


class SelfAttention(nn.Module):
    """Self-attention of one head: output_proj(softmax(Q K^T / sqrt(d_k)) V).

    The projections W_q, W_k, W_v and output_proj have biases.

    Args:
        d_model: features of the input and the output.
        d_k: width of the queries and keys.
        d_v: width of the values.

    Example:
        >>> attention = scaledot.dropin.self_attention.SelfAttention(4, 5, 3)
        >>> attention(torch.randn(3, 2, 4)).shape
        torch.Size([3, 2, 4])
    """

    @check_keywords
    def __init__(self, d_model: int, d_k: int, d_v: int) -> None:
        super().__init__()
        d_model, d_k, d_v = integer("d_model", d_model), integer("d_k", d_k), integer("d_v", d_v)
        self.d_model = d_model
        self.d_k = d_k
        self.d_v = d_v
        self._scale = _scale(d_k)
        self.W_q = nn.Linear(d_model, d_k)
        self.W_k = nn.Linear(d_model, d_k)
        self.W_v = nn.Linear(d_model, d_v)
        self.output_proj = nn.Linear(d_v, d_model)

    @hide_unknown
    def forward(self, x: Tensor, **unknown: Unpack[NoOptions]) -> Tensor:
        """Attends within each sequence: (..., n, d_model) -> (..., n, d_model)."""
        if unknown:
            raise unknown_keyword(SelfAttention.forward, *unknown)
        require_tensors(x=x)
        output = scaled_dot_product_attention(self.W_q(x), self.W_k(x), self.W_v(x), scale=truediv(*self._scale))
        return self.output_proj(output)


class SelfAttentionV2(nn.Module):
    """`SelfAttention` with a mask, and with dropout on the weights in training mode.

    Args:
        d_model: features of the input and the output.
        d_k: width of the queries and keys.
        d_v: width of the values.
        dropout_rate: probability of dropping a weight.

    Example:
        >>> attention = scaledot.dropin.self_attention.SelfAttentionV2(6, 5, 7)
        >>> attention(torch.randn(3, 4, 6), torch.ones(4, 4).tril()).shape
        torch.Size([3, 4, 6])
    """

    @check_keywords
    def __init__(self, d_model: int, d_k: int, d_v: int, dropout_rate: float = 0.1) -> None:
        super().__init__()
        d_model, d_k, d_v = integer("d_model", d_model), integer("d_k", d_k), integer("d_v", d_v)
        dropout_rate = _probability(dropout_rate)
        self.d_model = d_model
        self.d_k = d_k
        self.d_v = d_v
        self.dropout_rate = dropout_rate
        self._scale = _scale(d_k)
        self.W_q = nn.Linear(d_model, d_k)
        self.W_k = nn.Linear(d_model, d_k)
        self.W_v = nn.Linear(d_model, d_v)
        self.dropout = nn.Dropout(dropout_rate)
        self.output_proj = nn.Linear(d_v, d_model)

    @hide_unknown
    def forward(self, x: Tensor, attention_mask: Tensor | None = None, **unknown: Unpack[NoOptions]) -> Tensor:
        """Attends within each sequence.

        Args:
            x: (..., n, d_model).
            attention_mask: broadcasts with (..., n, n); 0 or False: do not attend.

        Returns:
            The output (..., n, d_model). A row with nothing to attend to is the bias of output_proj.

        Raises:
            ValueError: the mask does not broadcast with the scores.
        """
        if unknown:
            raise unknown_keyword(SelfAttentionV2.forward, *unknown)
        require_tensors(x=x)
        if attention_mask is not None:
            require_tensors(attention_mask=attention_mask)
        output, _ = attend(
            self.W_q(x),
            self.W_k(x),
            self.W_v(x),
            attended(attention_mask),
            scale=truediv(*self._scale),
            dropout=self.dropout,
            need_weights=False,
        )
        return self.output_proj(output)


class MultiHeadAttention(nn.Module):
    """Self-attention or cross-attention of `head_num` heads, each d_model / head_num wide.

    The projections W_q, W_k, W_v and output_proj are d_model x d_model with bias.

    Args:
        d_model: features of the inputs and the output.
        head_num: number of heads; divides d_model.
        dropout_rate: probability of dropping a weight, in training mode.

    Raises:
        ValueError: head_num does not divide d_model.

    Example:
        >>> attention = scaledot.dropin.self_attention.MultiHeadAttention(24, 4)
        >>> output, weights = attention(torch.randn(3, 5, 24))
        >>> output.shape, weights.shape
        (torch.Size([3, 5, 24]), torch.Size([3, 4, 5, 5]))
    """

    @check_keywords
    def __init__(self, d_model: int, head_num: int, dropout_rate: float = 0.1) -> None:
        super().__init__()
        d_model, head_num = integer("d_model", d_model), integer("head_num", head_num)
        dropout_rate = _probability(dropout_rate)
        if head_num < 1 or d_model % head_num != 0:
            raise ValueError(f"head_num: got {head_num}; needs a divisor of d_model, {d_model}")
        self.d_model = d_model
        self.dropout_rate = dropout_rate
        self.head_num = head_num
        self.head_dim = d_model // head_num
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout_rate)
        self.output_proj = nn.Linear(d_model, d_model)
        self.scale = math.sqrt(self.head_dim)  # what the scores are divided by

    @hide_unknown
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **unknown: Unpack[NoOptions],
    ) -> tuple[Tensor, Tensor]:
        """Attends from `query` to `key` and `value`.

        Args:
            query: (B, Lq, d_model).
            key: (B, Lk, d_model); default `query`.
            value: (B, Lk, d_model); default `query`, even if `key` is given.
            attention_mask: (B, Lk), or a shape that broadcasts with (B, head_num, Lq, Lk); 0 or False: do not attend.

        Returns:
            (output (B, Lq, d_model), weights after dropout (B, head_num, Lq, Lk)).

        Raises:
            ValueError: query is not 3-D, or the mask does not broadcast with the scores.
        """
        if unknown:
            raise unknown_keyword(MultiHeadAttention.forward, *unknown)
        key = query if key is None else key
        value = query if value is None else value
        require_tensors(query=query, key=key, value=value)
        if attention_mask is not None:
            require_tensors(attention_mask=attention_mask)
        if query.dim() != 3:
            raise ValueError(f"query: got shape {tuple(query.shape)}; needs (B, Lq, d_model)")
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = attention_mask[:, None, None, :]
        output, weights = attend(
            self._split(self.W_q(query)),
            self._split(self.W_k(key)),
            self._split(self.W_v(value)),
            attended(attention_mask),
            scale=1.0 / self.scale,
            dropout=self.dropout,
        )
        assert weights is not None
        return self.output_proj(output.transpose(1, 2).flatten(2)), weights

    def _split(self, x: Tensor) -> Tensor:
        """(B, L, d_model) -> (B, head_num, L, head_dim)"""
        return x.unflatten(-1, (self.head_num, self.head_dim)).transpose(1, 2)
