"""Multi-head attention that is constructed from a config dictionary and returns a dataclass.

It replaces the project code of a note on the scaled dot-product attention of "Attention Is All You Need". The source
tree has that code as tests/documents/config_mha.py.

Differences from the reference code:

- One fused kernel computes the heads. The reference computes the scores by matmul, then softmax, then matmul.
- A row whose logits are all -inf has zero weights. This needs float16, where -1e9 is -inf. The reference gives NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from .._checks import described, integer, require_tensors
from .._keywords import NoOptions, check_constructor, check_keywords, hide_unknown, unknown_keyword
from .attend import attend

__all__ = ["AttentionOutput", "MultiHeadAttention"]


@check_constructor
@dataclass
class AttentionOutput:
    """The result of `MultiHeadAttention`.

    Attributes:
        hidden_states: the output (B, Lq, d_model).
        attn_scores: the weights after the softmax (B, num_heads, Lq, Lk).
    """

    hidden_states: Tensor
    attn_scores: Tensor


class MultiHeadAttention(nn.Module):
    """Multi-head attention with the projections Wq, Wk, Wv and Wo, each d_model x d_model without bias.

    Args:
        config: ``config["d_model"]`` is the width of the inputs and the output. ``config["num_heads"]`` is the number
            of heads and divides it.

    Raises:
        AssertionError: num_heads does not divide d_model.
        TypeError, ValueError: a number in `config` is not an integer, or num_heads is below 1.

    Example:
        >>> attention = scaledot.dropin.config_mha.MultiHeadAttention({"d_model": 24, "num_heads": 4})
        >>> x = torch.randn(2, 5, 24)
        >>> attention(x, x, x).attn_scores.shape
        torch.Size([2, 4, 5, 5])
    """

    @check_keywords
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        if not isinstance(config, Mapping):
            raise TypeError(f"config: got {described(config)}; needs a mapping with d_model and num_heads")
        self.hidden_size: int = integer("d_model", config["d_model"])
        self.num_heads: int = integer("num_heads", config["num_heads"], least=1)
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

    @hide_unknown
    def forward(
        self,
        querys: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_mask: Tensor | None = None,
        **unknown: Unpack[NoOptions],
    ) -> AttentionOutput:
        """Attends from `querys` to `keys` and `values`.

        Args:
            querys: (B, Lq, d_model).
            keys: (B, Lk, d_model).
            values: (B, Lk, d_model).
            attn_mask: a 4-D mask of any dtype. It is cut to ``[:, :, :Lq, :Lk]``, which must broadcast to
                (B, num_heads, Lq, Lk). 1 or True hides a key and 0 does not: ``attn_mask * -1e9`` is added to the
                logits before they are divided by sqrt(head_dim). A row of ones therefore attends as if unmasked, at
                reduced precision.

        Returns:
            An :class:`AttentionOutput`.

        Raises:
            IndexError: the mask has fewer than 4 dimensions.
            TypeError: an argument is not a tensor.
            ValueError: shapes do not fit.
        """
        if unknown:
            raise unknown_keyword(MultiHeadAttention.forward, *unknown)
        require_tensors(querys=querys, keys=keys, values=values)
        if attn_mask is not None:
            require_tensors(attn_mask=attn_mask)
        query = self._split_heads(self.Wq(querys))
        key = self._split_heads(self.Wk(keys))
        value = self._split_heads(self.Wv(values))
        bias = None
        if attn_mask is not None:
            attn_mask = attn_mask[:, :, : query.size(-2), : key.size(-2)]
            # The mask gets the dtype of the logits before the division, as in the reference: in float16, -1e9 is -inf.
            bias = (attn_mask * -1e9).to(query.dtype) / self.head_dim**0.5
        output, weights = attend(query, key, value, bias, scale=self.head_dim**-0.5)
        assert weights is not None
        return AttentionOutput(hidden_states=self.Wo(self._merge_heads(output)), attn_scores=weights)
