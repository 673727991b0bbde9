"""Rotary position embedding (Su et al., "RoFormer", 2021), as flash_attn_with_kvcache applies it."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..._checks import require_tensors


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """`x` with pairs of its first dimensions rotated: (a, b) becomes (a cos - b sin, a sin + b cos).

    Args:
        x: (B, L, H, D).
        cos, sin: (positions, R / 2), R at most D. The dimensions from R on are left as they are.
        positions: (B, L), integers: the rows of cos and sin.
        interleaved: pairs are the dimensions (0, 1), (2, 3), and so on; otherwise (0, R / 2), (1, R / 2 + 1), ...

    Returns:
        (B, L, H, D) in x's dtype. It is computed in at least float32.
    """
    width = 2 * cos.size(-1)
    precise = torch.promote_types(x.dtype, torch.float32)
    c, s = (table[positions].unsqueeze(2).to(precise) for table in (cos, sin))  # (B, L, 1, R / 2)
    turned, rest = x[..., :width].to(precise), x[..., width:]
    if interleaved:
        a, b = turned.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * c - b * s, a * s + b * c], -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def check_rotary(
    q: Tensor, cos: Tensor | None, sin: Tensor | None, capacity: int, places: Tensor
) -> tuple[Tensor, Tensor]:
    """cos and sin. Raises an error unless they fit to q (B, L, H, D), and have a row for each position.

    Args:
        capacity: the most keys of a sequence.
        places: the positions of q. They are not looked at on a GPU, which would synchronise.
    """
    require_tensors(rotary_cos=cos, rotary_sin=sin)
    cos, sin = cast(Tensor, cos), cast(Tensor, sin)
    rows = capacity
    if not places.is_cuda and not torch.compiler.is_compiling() and places.numel():
        rows = max(rows, int(places.max()) + 1)
    if cos.dim() != 2 or cos.size(0) < rows or 2 * cos.size(1) > q.size(-1):
        needs = f"(rows, R / 2) with at least {rows} rows, one for each position, and R at most {q.size(-1)}"
        raise ValueError(f"rotary_cos: got shape {tuple(cos.shape)}; needs {needs}")
    if sin.shape != cos.shape:
        raise ValueError(f"rotary_sin: got shape {tuple(sin.shape)}; needs {tuple(cos.shape)}, as rotary_cos")
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if table.dtype != q.dtype:
            raise TypeError(f"{name}: got {table.dtype}; needs {q.dtype}, as q")
    return cos, sin
