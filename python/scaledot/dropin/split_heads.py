"""Multi-head self-attention without an output projection: the heads are split, attend, and are concatenated.

It replaces the script of a note on attention, which projects 3 vectors of width 1000 to width 64, splits them into 4
heads and loops over the heads. The source tree has that script as tests/documents/split_heads.py.

Differences from the reference code:

- It is a module. The script's variables W_q, W_k and W_v are its parameters.
- It takes any batch dimensions; the script takes one sequence (n, input_dim).
- One fused kernel computes all heads; the script loops over them.
"""

from __future__ import annotations

from torch import Tensor, nn
from typing_extensions import Unpack

from .._checks import integer, require_tensors
from .._keywords import NoOptions, check_keywords, hide_unknown, unknown_keyword
from ..functional import scaled_dot_product_attention

__all__ = ["SplitHeadAttention"]


class SplitHeadAttention(nn.Module):
    """Self-attention of `num_heads` heads, each output_dim / num_heads wide.

    The projections W_q, W_k and W_v map input_dim to output_dim, with bias.

    Args:
        input_dim: features of the input.
        output_dim: features of the output: the width of all heads together.
        num_heads: number of heads; divides output_dim.

    Raises:
        ValueError: num_heads does not divide output_dim.

    Example:
        >>> attention = scaledot.dropin.split_heads.SplitHeadAttention(1000, 64, 4)
        >>> attention(torch.randn(3, 1000)).shape
        torch.Size([3, 64])
    """

    @check_keywords
    def __init__(self, input_dim: int, output_dim: int, num_heads: int) -> None:
        super().__init__()
        input_dim, output_dim = integer("input_dim", input_dim), integer("output_dim", output_dim)
        num_heads = integer("num_heads", num_heads)
        if num_heads < 1 or output_dim % num_heads != 0:
            raise ValueError(f"num_heads: got {num_heads}; needs a divisor of output_dim, {output_dim}")
        self.num_heads = num_heads
        self.head_dim = output_dim // num_heads
        self.W_q = nn.Linear(input_dim, output_dim)
        self.W_k = nn.Linear(input_dim, output_dim)
        self.W_v = nn.Linear(input_dim, output_dim)

    @hide_unknown
    def forward(self, X: Tensor, **unknown: Unpack[NoOptions]) -> Tensor:
        """Attends within each sequence.

        Args:
            X: (..., n, input_dim), with any batch dimensions or none.

        Returns:
            The output (..., n, output_dim).

        Raises:
            ValueError: X has fewer than 2 dimensions.
        """
        if unknown:
            raise unknown_keyword(SplitHeadAttention.forward, *unknown)
        require_tensors(X=X)
        if X.dim() < 2:
            raise ValueError(f"X: got shape {tuple(X.shape)}; needs (..., n, input_dim)")
        query, key, value = (
            projection(X).unflatten(-1, (self.num_heads, self.head_dim)).transpose(-3, -2)
            for projection in (self.W_q, self.W_k, self.W_v)
        )
        return scaled_dot_product_attention(query, key, value).transpose(-3, -2).flatten(-2)
