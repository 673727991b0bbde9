"""Self-attention with widths of its own, the same with mask and dropout, and multi-head attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..functional import scaled_dot_product_attention
from .attend import attend, attended


def _scale(d_k: int) -> float:
    """1 / sqrt(d_k) with the root in float32, as the classes below define it for every dtype."""
    return 1.0 / float(torch.tensor(d_k, dtype=torch.float32, device="cpu").sqrt())


class SelfAttention(nn.Module):
    """One head: queries and keys are d_k wide, values d_v, and the output is projected back to d_model.

    Parameters: W_q, W_k, W_v and output_proj, all with bias.
    """

    def __init__(self, d_model: int, d_k: int, d_v: int) -> None:
        super().__init__()
        self.d_model = d_model
        self.d_k = d_k
        self.d_v = d_v
        self._scale = _scale(d_k)
        self.W_q = nn.Linear(d_model, d_k)
        self.W_k = nn.Linear(d_model, d_k)
        self.W_v = nn.Linear(d_model, d_v)
        self.output_proj = nn.Linear(d_v, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """(..., n, d_model) -> (..., n, d_model)"""
        output = scaled_dot_product_attention(self.W_q(x), self.W_k(x), self.W_v(x), scale=self._scale)
        return self.output_proj(output)


class SelfAttentionV2(nn.Module):
    """`SelfAttention` with a mask, and dropout on the weights while training."""

    def __init__(self, d_model: int, d_k: int, d_v: int, dropout_rate: float = 0.1) -> None:
        super().__init__()
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

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(..., n, d_model) -> (..., n, d_model). attention_mask broadcasts with (..., n, n); 0 or False: do not
        attend. A row that may attend to nothing comes out as output_proj's bias."""
        output, _ = attend(
            self.W_q(x),
            self.W_k(x),
            self.W_v(x),
            attended(attention_mask),
            scale=self._scale,
            dropout=self.dropout,
            need_weights=False,
        )
        return self.output_proj(output)


class MultiHeadAttention(nn.Module):
    """Self- or cross-attention of `head_num` heads, each d_model / head_num wide.

    Parameters: W_q, W_k, W_v and output_proj, all d_model x d_model with bias.
    """

    def __init__(self, d_model: int, head_num: int, dropout_rate: float = 0.1) -> None:
        super().__init__()
        if head_num < 1 or d_model % head_num != 0:
            raise ValueError(f"head_num must divide d_model, got head_num={head_num}, d_model={d_model}")
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

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(output (B, Lq, d_model), weights after dropout (B, head_num, Lq, Lk)).

        query (B, Lq, d_model); key and value (B, Lk, d_model), either of which defaults to query. attention_mask: 0
        or False for keys to leave out; (B, Lk), or a shape that broadcasts with (B, head_num, Lq, Lk).
        """
        key = query if key is None else key
        value = query if value is None else value
        if query.dim() != 3:
            raise ValueError(f"query needs the shape (batch, length, d_model), got {tuple(query.shape)}")
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
