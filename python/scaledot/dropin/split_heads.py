"""Attention over heads that are cut from three projections and put side by side again, without an output
projection."""

from __future__ import annotations

from torch import Tensor, nn

from ..functional import scaled_dot_product_attention


class SplitHeadAttention(nn.Module):
    """Self-attention of `num_heads` heads, each output_dim / num_heads wide.

    Parameters: W_q, W_k and W_v, each input_dim -> output_dim with bias. ValueError if num_heads does not divide
    output_dim.
    """

    def __init__(self, input_dim: int, output_dim: int, num_heads: int) -> None:
        super().__init__()
        if num_heads < 1 or output_dim % num_heads != 0:
            raise ValueError(f"num_heads must divide output_dim, got num_heads={num_heads}, output_dim={output_dim}")
        self.num_heads = num_heads
        self.head_dim = output_dim // num_heads
        self.W_q = nn.Linear(input_dim, output_dim)
        self.W_k = nn.Linear(input_dim, output_dim)
        self.W_v = nn.Linear(input_dim, output_dim)

    def forward(self, X: Tensor) -> Tensor:
        """(..., n, input_dim) -> (..., n, output_dim): unbatched, or with any batch dimensions."""
        if X.dim() < 2:
            raise ValueError(f"X needs the shape (..., n, input_dim), got {tuple(X.shape)}")
        query, key, value = (
            projection(X).unflatten(-1, (self.num_heads, self.head_dim)).transpose(-3, -2)
            for projection in (self.W_q, self.W_k, self.W_v)
        )
        return scaled_dot_product_attention(query, key, value).transpose(-3, -2).flatten(-2)
