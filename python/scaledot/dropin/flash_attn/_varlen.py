"""flash_attn_varlen_func and its packed forms, for sequences of different lengths without padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..._checks import described, flag, integer, number, require_dense, require_tensors
from ..._keywords import NoOptions, check_keywords, hide_unknown, unknown_keyword
from ...explanation import explain_varlen
from ...functional import scaled_dot_product_attention
from ...varlen import varlen_attention
from .._strides import nested_like_query
from ._options import KV_NAMES, QKV_NAMES, Result, check_qkv, naming, options, renamed, unpacked

__all__ = ["flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func"]

_SELF_NAMES = {f"{name}_{side}": name for name in ("cu_seqlens", "max_seqlen") for side in "qk"}  # one for both


@hide_unknown
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    **unknown: Unpack[NoOptions],
) -> Result:
    """flash-attn's function of this name. Gradients reach q, k and v, except in a call with a block_table.

    Args:
        q: (total_q, H, D): float32, float64, bfloat16 or float16, with any strides.
        k: (total_k, Hkv, D), where Hkv divides H; with `block_table` pages (pages, page_size, Hkv, D).
        v: the same with Dv for D.
        cu_seqlens_q: (N + 1,), int32 or int64: 0, then the end of each sequence in q. The last is total_q.
        cu_seqlens_k: the same for k. With `block_table` it says how many keys each sequence has.
        max_seqlen_q: at least the number of queries of the longest sequence.
        max_seqlen_k: at least the number of keys of the longest sequence.
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic: as in :func:`flash_attn_func`, for each
            sequence alone.
        alibi_slopes: (H,) or (N, H).
        return_attn_probs: also return softmax_lse and S_dmask.
        block_table: (N, pages of a sequence), int32 or int64: the pages of each sequence. Pages are read in place.

    Returns:
        out (total_q, H, Dv) in q's dtype, or (out, softmax_lse, S_dmask). softmax_lse is (H, total_q), float32 (float64
        for float64). S_dmask is (N, H, max_seqlen_q, max_seqlen_k) in q's dtype: the weights that multiplied the
        values, after dropout, in the upper left corner of each sequence, and 0 elsewhere. With dropout_p=0 it is an
        empty tensor of shape (0,). It takes one call for each sequence, and synchronises to learn the lengths.

    Raises:
        ValueError, TypeError: shapes, dtypes or options that do not fit, or return_attn_probs=True with dropout and a
            block_table. The message names the argument.

    Example:
        >>> import torch
        >>> from scaledot.dropin.flash_attn import flash_attn_varlen_func
        >>> q, k, v = torch.randn(3, 7, 8, 64).unbind()   # 7 tokens: sequences of 3 and 4
        >>> cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 4, 4, causal=True).shape
        torch.Size([7, 8, 64])
    """
    if unknown:
        raise unknown_keyword(flash_attn_varlen_func, *unknown)
    flag("deterministic", deterministic)
    dropout_p = number("dropout_p", dropout_p)
    max_seqlen_q = integer("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = integer("max_seqlen_k", max_seqlen_k)
    require_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    paged: dict[str, Any] = {}
    if block_table is None:
        check_qkv("total, H, D", q, k, v)
    else:
        require_tensors(block_table=block_table)
        check_qkv("total, H, D", q, k, v, kv_dims="pages, page_size, H, D")
        require_dense(q=q, cu_seqlens_k=cu_seqlens_k, block_table=block_table)
        if cu_seqlens_k.dim() != 1:
            raise ValueError(f"cu_seqlens_k: got {described(cu_seqlens_k)}; needs (N + 1,)")
        paged = {"block_table": block_table, "seqused_k": cu_seqlens_k.diff()}
    arguments = options(q, k, softmax_scale, causal, window_size, softcap, alibi_slopes)
    if flag("return_attn_probs", return_attn_probs) and dropout_p > 0:
        if block_table is not None:
            raise ValueError(
                "return_attn_probs: got True with dropout_p > 0 and a block_table; needs one of them absent"
            )
        if cu_seqlens_q.numel() < 2:
            raise ValueError(
                "cu_seqlens_q: got no sequence; needs at least one with return_attn_probs and dropout_p > 0"
            )
        _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=dropout_p, **arguments)
        ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        return _one_by_one(q, k, v, *ends, max_seqlen_q, max_seqlen_k, dropout_p, arguments)
    try:
        results = varlen_attention(
            q,
            k,
            v,
            cu_seqlens_q,
            None if paged else cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            dropout_p=dropout_p,
            return_lse=return_attn_probs,
            **paged,
            **arguments,
        )
    except (TypeError, ValueError) as error:
        raise renamed(error) from None
    if not return_attn_probs:
        return nested_like_query(results, q)
    out, lse = results
    return nested_like_query(out, q), lse, q.new_empty(0)


def _check(q: Tensor, k: Tensor, v: Tensor, *lengths: Any, **arguments: Any) -> None:
    """Raises what the packed call would raise. On a GPU too the lengths are checked against each other."""
    tensors, options = [q, k, v, *lengths], dict(arguments)
    if q.is_cuda:
        stand_ins = [t.new_empty(1, device="cpu").expand(t.shape) for t in tensors[:3]]  # only their shapes count
        tensors = [*stand_ins, *(x.cpu() if isinstance(x, Tensor) else x for x in lengths)]
        options = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in options.items()}
    try:
        explain_varlen(*tensors, **options)
    except (TypeError, ValueError) as error:
        raise renamed(error) from None


def _one_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: list[int],
    ends_k: list[int],
    max_q: int,
    max_k: int,
    dropout_p: float,
    arguments: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, weights), which takes one call for each sequence: a packed call returns no weights."""
    slopes = arguments.pop("alibi_slopes")
    outs, lses = [], []
    try:
        weights = q.new_zeros(len(ends_q) - 1, q.size(-2), max_q, max_k)
    except RuntimeError as error:
        needs = f"lengths for which there is memory: S_dmask also has max_seqlen_k={max_k}"
        raise ValueError(f"max_seqlen_q: got {max_q}; needs {needs}") from error
    for b in range(len(ends_q) - 1):
        rows, keys = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        results: Any = scaled_dot_product_attention(
            q[rows].transpose(0, 1),
            k[keys].transpose(0, 1),
            v[keys].transpose(0, 1),
            dropout_p=dropout_p,
            alibi_slopes=slopes[b] if slopes is not None and slopes.dim() == 2 else slopes,
            return_weights=True,
            return_lse=True,
            **arguments,
        )
        out, weight, lse = results
        outs.append(out.transpose(0, 1))
        lses.append(lse)
        weights[b, :, : weight.size(-2), : weight.size(-1)] = weight
    return nested_like_query(torch.cat(outs), q), torch.cat(lses, -1), weights


@check_keywords
@naming(KV_NAMES)
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` with keys and values in one tensor `kv` (total_k, 2, Hkv, D)."""
    k, v = unpacked("kv", kv, 2, "total, 2, H, D")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@check_keywords
@naming(_SELF_NAMES | QKV_NAMES)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_varlen_func` with queries, keys and values in one tensor `qkv` (total, 3, H, D)."""
    q, k, v = unpacked("qkv", qkv, 3, "total, 3, H, D")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
