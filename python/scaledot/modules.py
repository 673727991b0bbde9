"""MultiHeadAttention: an attention layer built on scaled_dot_product_attention."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ._checks import check_device, check_dtype, check_layout, flag, integer, number, require_tensors
from ._keywords import NoOptions, check_keywords, hide_unknown, unknown_keyword
from ._score import ScoreMod
from ._torch.fx import Proxy, record_module
from .block_mask import BlockMask
from .functional import scaled_dot_product_attention
from .options import Window, as_constant

__all__ = ["MultiHeadAttention"]


class MultiHeadAttention(nn.Module):
    r"""Multi-head attention (Vaswani et al., "Attention Is All You Need", 2017), batch first.

    For query head h and key and value head g::

        g       = h // (num_heads // num_kv_heads)
        head_h  = attention(q_proj(query)_h, k_proj(key)_g, v_proj(value)_g)
        output  = out_proj(concat(head_0, ..., head_{num_heads-1}))

    `num_kv_heads` selects multi-head attention (MHA, the default), grouped-query attention (GQA; Ainslie et al., "GQA:
    Training Generalized Multi-Query Transformer Models", 2023) or multi-query attention (MQA; Shazeer, "Fast
    Transformer Decoding", 2019). With num_heads = 4::

        num_kv_heads = 4: MHA      num_kv_heads = 2: GQA      num_kv_heads = 1: MQA

        v  0   1   2   3           v    0       1             v        0
           |   |   |   |                |       |                      |
        k  0   1   2   3           k    0       1             k        0
           |   |   |   |              .-+-.   .-+-.              .---.-+-.---.
        q  0   1   2   3           q  0   1   2   3           q  0   1   2   3

    The submodules `q_proj`, `k_proj`, `v_proj` and `out_proj` are :class:`torch.nn.Linear`. Their weights are
    initialised by ``xavier_uniform_`` (Glorot and Bengio, 2010), each with the bound for its shape. Biases start
    at 0.

    Args:
        embed_dim: features of `query`.
        num_heads: number of query heads.
        kdim: features of `key`; default embed_dim.
        vdim: features of `value`; default embed_dim.
        out_dim: features of the output; default embed_dim.
        qk_dim: total width of the projected query heads, a multiple of num_heads; default embed_dim. The projected keys
            have width ``qk_dim // num_heads * num_kv_heads``.
        v_dim: total width of the concatenated output heads, a multiple of num_heads; default embed_dim. The projected
            values have width ``v_dim // num_heads * num_kv_heads``.
        num_kv_heads: number of key and value heads, a divisor of num_heads; default num_heads.
        bias: whether the projections have biases.
        out_proj: whether there is an output projection. Without it the output is the concatenated heads, of width
            v_dim, and the attribute `out_proj` is None.
        dropout: probability of dropping an attention weight, in [0, 1]. Applies in training mode only.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Raises:
        TypeError: an argument has the wrong type, such as a size that is not an integer.
        ValueError: a number is out of range, or a width or number of heads is not divisible as required.

    Example:
        >>> attention = scaledot.MultiHeadAttention(512, 8, num_kv_heads=2, dropout=0.1)
        >>> x = torch.randn(4, 100, 512)
        >>> output, weights = attention(x, is_causal=True, need_weights=True)
        >>> output.shape, weights.shape
        (torch.Size([4, 100, 512]), torch.Size([4, 8, 100, 100]))
    """

    @check_keywords
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
        check_device("device", device)
        check_dtype("dtype", dtype)
        self.embed_dim = _size("embed_dim", embed_dim)
        self.num_heads = _size("num_heads", num_heads)
        self.kdim = _size("kdim", kdim, self.embed_dim)
        self.vdim = _size("vdim", vdim, self.embed_dim)
        self.qk_dim = _size("qk_dim", qk_dim, self.embed_dim)
        self.v_dim = _size("v_dim", v_dim, self.embed_dim)
        self.num_kv_heads = _size("num_kv_heads", num_kv_heads, self.num_heads)
        if not flag("out_proj", out_proj) and out_dim is not None:
            raise ValueError(f"out_dim: got {out_dim} with out_proj=False; needs None (the output is v_dim wide)")
        self.out_dim = _size("out_dim", out_dim, self.embed_dim) if out_proj else self.v_dim
        for name, width, given in (("qk_dim", self.qk_dim, qk_dim), ("v_dim", self.v_dim, v_dim)):
            if width % self.num_heads:
                source = "" if given is not None else " (the default, embed_dim)"
                raise ValueError(f"{name}: got {width}{source}; needs a multiple of num_heads, {num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: got {num_kv_heads}; needs a divisor of num_heads, {num_heads}")
        dropout = number("dropout", dropout)
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout: got {dropout}; needs a probability in [0, 1]")
        self.dropout: float = as_constant(float(dropout))
        self.head_dim = self.qk_dim // self.num_heads
        self.v_head_dim = self.v_dim // self.num_heads

        options: dict[str, Any] = {"bias": flag("bias", bias), "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(self.embed_dim, self.qk_dim, **options)
        self.k_proj = nn.Linear(self.kdim, self.head_dim * self.num_kv_heads, **options)
        self.v_proj = nn.Linear(self.vdim, self.v_head_dim * self.num_kv_heads, **options)
        self.out_proj = nn.Linear(self.v_dim, self.out_dim, **options) if out_proj else None
        self.reset_parameters()

    @check_keywords
    def reset_parameters(self) -> None:
        """Initialises the weights by ``xavier_uniform_`` and sets the biases to 0."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if projection is not None:
                nn.init.xavier_uniform_(projection.weight)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)

    @hide_unknown
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
        relative_bias: Tensor | None = None,
        block_mask: BlockMask | Any | None = None,
        score_mod: ScoreMod | None = None,
        **unknown: Unpack[NoOptions],
    ) -> tuple[Tensor, Tensor | None]:
        """Attends from `query` to `key` and `value`.

        Args:
            query: (B, Lq, embed_dim), or (Lq, embed_dim) without a batch. It may be a nested tensor of layout
                torch.jagged, (B, j, embed_dim) with sequences of different lengths; then key and value must be too.
            key: (B, Lk, kdim) or (Lk, kdim); default `query`.
            value: (B, Lk, vdim) or (Lk, vdim); default `key`.
            attn_mask: a boolean mask (True = may attend) or a floating mask (added to the scores), broadcastable to
                (B, num_heads, Lq, Lk). A 3-D mask has one mask per head, (num_heads, Lq, Lk). Pass one mask per
                sequence as (B, 1, Lq, Lk).
            key_mask: a boolean mask (B, Lk), or (Lk,) for all sequences. True = may attend, False = padding. It
                combines with all other masks. With `attn_mask`, the two are merged into one mask of the shape to
                which they broadcast.
            is_causal: position i attends to keys 0 to i only.
            window: (left, right): position i attends to keys i - left to i + right only. None on a side means no limit.
            need_weights: whether to return the attention weights of every head.
            relative_bias: (num_heads, 2 M + 1), or any shape that broadcasts to (B, num_heads, 2 M + 1): entry
                M + clamp(j - i, -M, M) is added to the score of position i and key j. It gets a gradient.
            block_mask: a :class:`scaledot.BlockMask` or a ``torch.nn.attention.flex_attention.BlockMask`` for these
                lengths; its batch and head dimensions may be 1.
            score_mod: a function of (score, b, h, q_idx, kv_idx), as :func:`scaledot.scaled_dot_product_attention`
                takes.

        Nested tensors take no `attn_mask`, `key_mask`, `block_mask` or `score_mod`, and return no weights.

        Returns:
            (output, weights). The output is (B, Lq, out_dim) or (Lq, out_dim). The weights, after dropout, are
            (B, num_heads, Lq, Lk) or (num_heads, Lq, Lk); None unless `need_weights`. A position with nothing to attend
            to has weights of 0 and heads of 0, so its output is the bias of `out_proj`.

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: a shape does not fit, or a side of the window is negative.
        """
        if isinstance(query, Proxy):
            return record_module(  # type: ignore[no-any-return]
                self,
                query,
                key,
                value,
                attn_mask,
                key_mask=key_mask,
                is_causal=is_causal,
                window=window,
                need_weights=need_weights,
                relative_bias=relative_bias,
                block_mask=block_mask,
                score_mod=score_mod,
                unknown=unknown,
            )
        if unknown:
            raise unknown_keyword(MultiHeadAttention.forward, *unknown)
        if flag("need_weights", need_weights) and isinstance(query, Tensor) and query.is_nested:
            raise ValueError("need_weights: got True with nested tensors; needs False: weights differ in shape")
        key = query if key is None else key
        value = key if value is None else value
        self._check_features(query, key, value)
        batched = query.dim() == 3
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        if key_mask is not None:
            if key.is_nested:
                raise ValueError("key_mask: got a mask with nested tensors; needs None: they have no padding")
            attn_mask = _with_key_mask(attn_mask, key_mask, key, batched)

        results = scaled_dot_product_attention(
            _split(_projected("query", query, self.q_proj), self.num_heads, self.head_dim),
            _split(_projected("key", key, self.k_proj), self.num_kv_heads, self.head_dim),
            _split(_projected("value", value, self.v_proj), self.num_kv_heads, self.v_head_dim),
            attn_mask,
            self.dropout if self.training else 0.0,
            is_causal,
            enable_gqa=self.num_kv_heads != self.num_heads,
            window=window,
            relative_bias=relative_bias,
            block_mask=block_mask,
            score_mod=score_mod,
            return_weights=need_weights,
        )
        heads, weights = results if need_weights else (results, None)
        output = heads.transpose(1, 2).flatten(2)  # a view: the op's output has the memory layout (B, Lq, H, Dv)
        if self.out_proj is not None:
            output = self.out_proj(output)
        if not batched:
            output = output.squeeze(0)
            weights = weights if weights is None else weights.squeeze(0)
        return output, weights

    def _check_features(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        require_tensors(query=query, key=key, value=value)
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            _check_dense(name, tensor)  # first, because a nested tensor may have no shape to print
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
                    f"{name}: got shape {tuple(tensor.shape)}; needs a last dimension of {size}, {features}"
                )

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_torchscript(self)

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults, for ``repr``."""
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


def refuse_torchscript(module: nn.Module) -> NoReturn:
    """For `__prepare_scriptable__`, which torch.jit.script calls on each module before it compiles any.

    TorchScript knows neither ``**options`` nor most of what the checks are written with. torch itself has deprecated
    it, and does not support it on Python 3.14 and newer.
    """
    raise NotImplementedError(
        f"torch.jit.script: got a {type(module).__module__}.{type(module).__qualname__}; needs torch's own modules, "
        "because scaledot's are not written in TorchScript. torch.export, torch.compile and torch.jit.trace take this "
        "module. Or script torch.nn.MultiheadAttention and run it under scaledot.dropin.sdpa.activate(), which "
        "reaches TorchScript"
    )


def _size(name: str, size: int | None, default: int | None = None) -> int:
    """`size` as a Python integer. None stands for the default, if there is one."""
    found: int = default if size is None and default is not None else integer(name, size, least=1)
    return found


def _projected(name: str, tensor: Tensor, projection: nn.Module) -> Tensor:
    """projection(tensor), with a better error where the tensor's dtype or device is not that of the weight."""
    try:
        projected: Tensor = projection(tensor)
    except RuntimeError:  # only now: under autocast and in hooks, other dtypes are right
        weight = getattr(projection, "weight", None)
        if isinstance(weight, Tensor) and weight.dtype != tensor.dtype:
            raise TypeError(f"{name}: got dtype {tensor.dtype}; needs {weight.dtype}, as the parameters") from None
        if isinstance(weight, Tensor) and weight.device != tensor.device:
            got = f"a tensor on {tensor.device}"
            raise ValueError(f"{name}: got {got}; needs {weight.device}, where the parameters are") from None
        raise
    return projected


def _split(projected: Tensor, heads: int, head_dim: int) -> Tensor:
    """(B, L, heads * head_dim) -> (B, heads, L, head_dim), a view."""
    split: Tensor = projected.unflatten(-1, (heads, head_dim)).transpose(1, 2)
    return split


def _check_dense(name: str, tensor: Tensor) -> None:
    if tensor.is_nested and tensor.layout != torch.jagged:
        got = f"a nested tensor of layout {tensor.layout}"
        raise TypeError(f"{name}: got {got}; needs layout=torch.jagged, or a dense one")
    check_layout(name, tensor, torch.jagged)


def _with_key_mask(attn_mask: Tensor | None, key_mask: Tensor, key: Tensor, batched: bool) -> Tensor:
    """Merges `attn_mask` and `key_mask` into one mask of the shape to which they broadcast.

    `key` is (B, Lk, kdim).
    """
    batch, key_length = key.shape[:2]
    require_tensors(key_mask=key_mask)
    _check_dense("key_mask", key_mask)
    if key_mask.device != key.device:
        raise ValueError(f"key_mask: got a tensor on {key_mask.device}; needs {key.device}, where key is")
    if key_mask.dtype != torch.bool:
        raise TypeError(f"key_mask: got dtype {key_mask.dtype}; needs torch.bool (True = may attend)")
    shapes = [(batch, key_length), (key_length,)] if batched else [(key_length,)]
    if tuple(key_mask.shape) not in shapes:
        needs = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"key_mask: got shape {tuple(key_mask.shape)}; needs {needs}, from the shape of key")
    attends = key_mask[..., None, None, :]  # broadcasts over heads and rows
    if attn_mask is None:
        return attends
    if not isinstance(attn_mask, Tensor) or not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
        return attn_mask  # the op raises the error
    if attn_mask.is_nested or attn_mask.layout != torch.strided or attn_mask.device != key.device:
        return attn_mask  # the op raises the error
    try:
        torch.broadcast_shapes(attn_mask.shape, attends.shape)
    except RuntimeError:
        raise ValueError(
            f"attn_mask: got shape {tuple(attn_mask.shape)}; needs a shape that broadcasts with (..., Lk), where Lk = "
            f"{key_length}, the length of key"
        ) from None
    if attn_mask.dtype == torch.bool:
        return attn_mask & attends
    return torch.where(attends, attn_mask, -math.inf)
