"""A model for the tests of torch.export, torch.jit and AOTInductor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

import scaledot


class Layer(nn.Module):
    """A module and a function call with most of their inference options."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = scaledot.MultiHeadAttention(16, 4, num_kv_heads=2)
        self.slopes = nn.Buffer(torch.tensor([0.5, 0.25]))

    def forward(self, x: Tensor, key_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, weights = self.attention(x, key_mask=key_mask, is_causal=True, window=(6, 0), need_weights=True)
        heads = y.unflatten(-1, (2, 8)).transpose(1, 2)
        output, lse = scaledot.scaled_dot_product_attention(
            heads, heads, heads, softcap=5.0, alibi_slopes=self.slopes, causal_alignment="lower_right", return_lse=True
        )
        assert weights is not None
        return output.transpose(1, 2).flatten(2), weights, lse


def inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([length] * (batch - 1) + [length - 2])
    return torch.randn(batch, length, 16), torch.arange(length) < lengths[:, None]


def exported(model: nn.Module) -> Any:
    """The model exported for any batch size and length."""
    dims = {0: Dim("batch", min=2, max=64), 1: Dim("length", min=3, max=512)}
    with torch.no_grad():
        return torch.export.export(model, inputs(3, 7), dynamic_shapes=(dims, dims))


def packaged(model: nn.Module, path: str) -> Any:
    """The model, compiled and written to a file by AOTInductor, and loaded from it."""
    torch._inductor.aoti_compile_and_package(exported(model), package_path=path)
    return torch._inductor.aoti_load_package(path)
