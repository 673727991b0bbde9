"""MultiHeadAttention: the attention layer over scaled_dot_product_attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .functional import scaled_dot_product_attention
from .options import Window

__all__ = ["MultiHeadAttention"]


class MultiHeadAttention(nn.Module):
    r"""Multi-head attention (Vaswani et al., "Attention Is All You Need", 2017), batch first::

        head_h = attention(q_proj(query)_h, k_proj(key)_g, v_proj(value)_g)          g = h // (num_heads //
        num_kv_heads) output = out_proj(concat(head_0, ..., head_{num_heads-1}))

    With fewer key and value heads than query heads it is grouped-query attention (Ainslie et al., "GQA",
    2023), with one it is multi-query attention (Shazeer, "Fast Transformer Decoding", 2019).

    Args:
        embed_dim: features of `query`.
        num_heads: query heads.
        kdim, vdim: features of `key` and of `value`; default embed_dim.
        out_dim: features of the output; default embed_dim.
        qk_dim: width of all projected query heads together, a multiple of num_heads; default embed_dim. The
            keys' is ``qk_dim // num_heads * num_kv_heads``.
        v_dim: the same for the values, as if there were num_heads value heads; default embed_dim. The
            projected values are ``v_dim // num_heads * num_kv_heads`` wide, the concatenated heads v_dim.
        num_kv_heads: key and value heads, a divisor of num_heads; default num_heads.
        bias: whether the projections have biases.
        out_proj: whether there is an output projection. Without it the output is the concatenated heads,
            v_dim wide, and the attribute `out_proj` is None.
        dropout: probability in [0, 1) of dropping an attention weight; in training mode only.
        device, dtype: of the parameters.

    The parameters are `q_proj`, `k_proj`, `v_proj` and `out_proj`, each an :class:`torch.nn.Linear`. Weights
    are initialised by Glorot and Bengio's uniform rule (2010), each projection by its own shape, biases with
    0.

    Raises:
        ValueError: a number outside its range, or heads that do not divide a width. TypeError: sizes that are
            no integers.

    Example:
        >>> attention = scaledot.MultiHeadAttention(512, 8, num_kv_heads=2, dropout=0.1)
        >>> x = torch.randn(4, 100, 512)
        >>> output, weights = attention(x, is_causal=True, need_weights=True)
        >>> output.shape, weights.shape
        (torch.Size([4, 100, 512]), torch.Size([4, 8, 100, 100]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        out_dim: int | None = None,
        qk_dim: int | None = None,
        v_dim: int | None = None,
        num_kv_heads: int | None = None,
        bias: bool = True,
        out_proj: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = _size("embed_dim", embed_dim)
        self.num_heads = _size("num_heads", num_heads)
        self.kdim = _size("kdim", kdim, embed_dim)
        self.vdim = _size("vdim", vdim, embed_dim)
        self.qk_dim = _size("qk_dim", qk_dim, embed_dim)
        self.v_dim = _size("v_dim", v_dim, embed_dim)
        self.num_kv_heads = _size("num_kv_heads", num_kv_heads, num_heads)
        if out_dim is not None and not out_proj:
            raise ValueError(f"out_dim: got {out_dim} with out_proj=False; without an output projection it is v_dim")
        self.out_dim = _size("out_dim", out_dim, embed_dim) if out_proj else self.v_dim
        for name, width, given in (("qk_dim", self.qk_dim, qk_dim), ("v_dim", self.v_dim, v_dim)):
            if width % self.num_heads:
                source = "" if given is not None else " (the default, embed_dim)"
                raise ValueError(f"{name}: got {width}{source}; needs a multiple of num_heads, {num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: got {num_kv_heads}; needs a divisor of num_heads, {num_heads}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout: got {dropout}; needs a probability in [0, 1)")
        self.dropout = float(dropout)
        self.head_dim = self.qk_dim // self.num_heads
        self.v_head_dim = self.v_dim // self.num_heads

        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(self.embed_dim, self.qk_dim, **options)
        self.k_proj = nn.Linear(self.kdim, self.head_dim * self.num_kv_heads, **options)
        self.v_proj = nn.Linear(self.vdim, self.v_head_dim * self.num_kv_heads, **options)
        self.out_proj = nn.Linear(self.v_dim, self.out_dim, **options) if out_proj else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new weights (xavier_uniform) and sets biases to 0."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if projection is not None:
                nn.init.xavier_uniform_(projection.weight)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attn_mask: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        window: Window | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends from `query` to `key` and `value`.

        Args:
            query: (B, Lq, embed_dim), or unbatched (Lq, embed_dim).
            key: (B, Lk, kdim) or (Lk, kdim); default `query`.
            value: (B, Lk, vdim) or (Lk, vdim); default `key`.
            attn_mask: boolean (True = may attend) or floating (added to the scores), of a shape that
                broadcasts to (B, num_heads, Lq, Lk). A 3-D mask is one mask a head, (num_heads, Lq, Lk): give
                one a sequence as (B, 1, Lq, Lk).
            key_mask: (B, Lk), or (Lk,) for all sequences; boolean, True = may attend: False for padding.
                Composes with all other masks; where `attn_mask` is given too, the two are combined at the
                shape they broadcast to.
            is_causal: position i attends to keys 0 to i.
            window: (left, right): position i attends to keys i - left to i + right; None: no limit on that
                side.
            need_weights: also return the attention weights of every head.

        Returns:
            (output, weights): output (B, Lq, out_dim), or (Lq, out_dim); weights (B, num_heads, Lq, Lk), or
            (num_heads, Lq, Lk), after dropout, or None.

        A position with nothing to attend to has a heads' output of 0 (so the output is out_proj's bias) and
        weights of 0.
        """
        key = query if key is None else key
        value = key if value is None else value
        self._check_features(query, key, value)
        batched = query.dim() == 3
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        if key_mask is not None:
            attn_mask = _with_key_mask(attn_mask, key_mask, key.shape[:2], batched)

        results = scaled_dot_product_attention(
            _split(self.q_proj(query), self.num_heads, self.head_dim),
            _split(self.k_proj(key), self.num_kv_heads, self.head_dim),
            _split(self.v_proj(value), self.num_kv_heads, self.v_head_dim),
            attn_mask,
            self.dropout if self.training else 0.0,
            is_causal,
            enable_gqa=self.num_kv_heads != self.num_heads,
            window=window,
            return_weights=need_weights,
        )
        heads, weights = results if need_weights else (results, None)
        output = heads.transpose(1, 2).flatten(2)  # no copy: the op lays its output out as (B, Lq, H, Dv)
        if self.out_proj is not None:
            output = self.out_proj(output)
        if not batched:
            output = output.squeeze(0)
            weights = weights if weights is None else weights.squeeze(0)
        return output, weights

    def _check_features(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name}: got a {type(tensor).__name__}; needs a tensor")
        rank = query.dim()
        if rank not in (2, 3):
            raise ValueError(f"query: got shape {tuple(query.shape)}; needs (B, Lq, embed_dim) or (Lq, embed_dim)")
        for name, tensor, features, size in (
            ("query", query, self.embed_dim, "embed_dim"),
            ("key", key, self.kdim, "kdim"),
            ("value", value, self.vdim, "vdim"),
        ):
            if tensor.dim() != rank:
                raise ValueError(f"{name}: got shape {tuple(tensor.shape)}; needs {rank} dimensions, as query has")
            if tensor.shape[-1] != features:
                raise ValueError(
                    f"{name}: got shape {tuple(tensor.shape)}; its last dimension needs to be {size}, {features}"
                )

    def extra_repr(self) -> str:
        parts = [f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"]
        for name, value, default in (
            ("kdim", self.kdim, self.embed_dim),
            ("vdim", self.vdim, self.embed_dim),
            ("qk_dim", self.qk_dim, self.embed_dim),
            ("v_dim", self.v_dim, self.embed_dim),
            ("out_dim", self.out_dim, self.embed_dim if self.out_proj is not None else self.v_dim),
            ("num_kv_heads", self.num_kv_heads, self.num_heads),
            ("dropout", self.dropout, 0.0),
        ):
            if value != default:
                parts.append(f"{name}={value}")
        if self.out_proj is None:
            parts.append("out_proj=False")
        return ", ".join(parts)


def _size(name: str, size: int | None, default: int = 0) -> int:
    size = default if size is None else size
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name}: got {size!r}, a {type(size).__name__}; needs an integer")
    if size < 1:
        raise ValueError(f"{name}: got {size}; needs at least 1")
    return size


def _split(projected: Tensor, heads: int, head_dim: int) -> Tensor:
    """(B, L, heads * head_dim) -> (B, heads, L, head_dim), without a copy."""
    split: Tensor = projected.unflatten(-1, (heads, head_dim)).transpose(1, 2)
    return split


def _with_key_mask(attn_mask: Tensor | None, key_mask: Tensor, keys: torch.Size, batched: bool) -> Tensor:
    """The one mask that says what `attn_mask` and `key_mask` say together, no larger than they broadcast."""
    batch, key_length = keys
    if not isinstance(key_mask, Tensor):
        raise TypeError(f"key_mask: got a {type(key_mask).__name__}; needs a tensor")
    if key_mask.dtype != torch.bool:
        raise TypeError(f"key_mask: got dtype {key_mask.dtype}; needs torch.bool, True = may attend")
    shapes = [(batch, key_length), (key_length,)] if batched else [(key_length,)]
    if tuple(key_mask.shape) not in shapes:
        needs = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"key_mask: got shape {tuple(key_mask.shape)}; needs {needs}, from the shape of key")
    attends = key_mask[..., None, None, :]  # over heads and rows
    if attn_mask is None:
        return attends
    if not isinstance(attn_mask, Tensor) or not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
        return attn_mask  # the op says what is wrong with it
    try:
        torch.broadcast_shapes(attn_mask.shape, attends.shape)
    except RuntimeError:
        raise ValueError(
            f"attn_mask: got shape {tuple(attn_mask.shape)}; needs one that broadcasts with (..., Lk), "
            f"where key has Lk = {key_length}"
        ) from None
    if attn_mask.dtype == torch.bool:
        return attn_mask & attends
    return torch.where(attends, attn_mask, -math.inf)
