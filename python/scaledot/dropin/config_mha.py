"""Multi-head attention that is made from a config dictionary and returns a dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .attend import attend


@dataclass
class AttentionOutput:
    """hidden_states (B, Lq, d_model); attn_scores (B, num_heads, Lq, Lk), the weights after the softmax."""

    hidden_states: Tensor
    attn_scores: Tensor


class MultiHeadAttention(nn.Module):
    """`config["d_model"]` is the width of inputs and output, `config["num_heads"]` divides it (else
    AssertionError).

    Parameters: Wq, Wk, Wv and Wo, all d_model x d_model without bias.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.hidden_size: int = config["d_model"]
        self.num_heads: int = config["num_heads"]
        if self.hidden_size % self.num_heads != 0:
            raise AssertionError(
                f"Hidden size must be divisible by num_heads but got {self.hidden_size} and {self.num_heads}"
            )
        self.head_dim = self.hidden_size // self.num_heads
        self.Wq = nn.Linear(self.hidden_size, self.hidden_size, bias=False)
        self.Wk = nn.Linear(self.hidden_size, self.hidden_size, bias=False)
        self.Wv = nn.Linear(self.hidden_size, self.hidden_size, bias=False)
        self.Wo = nn.Linear(self.hidden_size, self.hidden_size, bias=False)

    def _split_heads(self, x: Tensor) -> Tensor:
        """(B, L, d_model) -> (B, num_heads, L, head_dim)"""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _merge_heads(self, x: Tensor) -> Tensor:
        """(B, num_heads, L, head_dim) -> (B, L, d_model)"""
        return x.transpose(1, 2).flatten(2)

    def forward(self, querys: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor | None = None) -> AttentionOutput:
        """querys (B, Lq, d_model), keys and values (B, Lk, d_model).

        attn_mask, if given, has 4 dimensions, is cut to [:, :, :Lq, :Lk] and must then broadcast to (B, num_heads,
        Lq, Lk). It is not a choice but a weight: attn_mask * -1e9 is added to the logits before they are divided by
        sqrt(head_dim). So 1 (or True) hides a key, 0 does not, and a row of ones attends as if nothing was masked,
        in what precision is left.
        """
        query = self._split_heads(self.Wq(querys))
        key = self._split_heads(self.Wk(keys))
        value = self._split_heads(self.Wv(values))
        bias = None
        if attn_mask is not None:
            attn_mask = attn_mask[:, :, : query.size(-2), : key.size(-2)]
            # In the logits' dtype before the division: -1e9 is -inf in float16, in the logits as here.
            bias = (attn_mask * -1e9).to(query.dtype) / self.head_dim**0.5
        output, weights = attend(query, key, value, bias, scale=self.head_dim**-0.5)
        assert weights is not None
        return AttentionOutput(hidden_states=self.Wo(self._merge_heads(output)), attn_scores=weights)
