"""flash_attn_func and its packed forms, for batches of sequences of one length."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from ..._checks import flag, number
from ..._keywords import NoOptions, check_keywords, hide_unknown, unknown_keyword
from ...functional import scaled_dot_product_attention
from .._strides import strides_like_query
from ._options import KV_NAMES, QKV_NAMES, Result, check_qkv, naming, options, renamed, unpacked

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"]


@hide_unknown
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **unknown: Unpack[NoOptions],
) -> Result:
    """flash-attn's function of this name. Gradients reach q, k and v; double backward works as well.

    Args:
        q: (B, Lq, H, D): float32, float64, bfloat16 or float16, with any strides.
        k: (B, Lk, Hkv, D), where Hkv divides H.
        v: (B, Lk, Hkv, Dv).
        dropout_p: in [0, 1]: the probability of dropping a weight.
        softmax_scale: the factor of the scores; default 1 / sqrt(D).
        causal: row i attends to keys up to i + Lk - Lq.
        window_size: (left, right): row i attends to the keys from i + Lk - Lq - left to i + Lk - Lq + right. A negative
            number is no limit.
        softcap: above 0, scores become softcap * tanh(score / softcap).
        alibi_slopes: (H,) or (B, H): adds ``-slope * |i + Lk - Lq - j|``.
        deterministic: results are deterministic with False too.
        return_attn_probs: also return softmax_lse and S_dmask.

    Returns:
        out (B, Lq, H, Dv) in q's dtype, or (out, softmax_lse, S_dmask). softmax_lse is (B, H, Lq), float32 (float64 for
        float64), -inf for a row without keys. S_dmask is (B, H, Lq, Lk) in q's dtype: the weights that multiplied the
        values, after dropout. With dropout_p=0 it is an empty tensor of shape (0,).

    Raises:
        ValueError, TypeError: shapes, dtypes or options that do not fit. The message names the argument.

    Example:
        >>> import torch
        >>> from scaledot.dropin.flash_attn import flash_attn_func
        >>> q, k, v = torch.randn(3, 2, 100, 8, 64).unbind()
        >>> flash_attn_func(q, k, v, causal=True).shape
        torch.Size([2, 100, 8, 64])
    """
    if unknown:
        raise unknown_keyword(flash_attn_func, *unknown)
    check_qkv("B, L, H, D", q, k, v)
    flag("deterministic", deterministic)
    dropout_p = number("dropout_p", dropout_p)
    wants_weights = flag("return_attn_probs", return_attn_probs) and dropout_p > 0
    arguments = options(q, k, softmax_scale, causal, window_size, softcap, alibi_slopes)
    query, key, value = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    arguments |= strides_like_query(query, key, value)
    try:
        results = scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout_p,
            return_weights=wants_weights,
            return_lse=return_attn_probs,
            **arguments,
        )
    except (TypeError, ValueError) as error:
        raise renamed(error) from None
    if not return_attn_probs:
        output: Tensor = results
        return output.transpose(1, 2)
    out, *weights, lse = results
    return out.transpose(1, 2), lse, weights[0] if wants_weights else q.new_empty(0)


@check_keywords
@naming(KV_NAMES)
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` with keys and values in one tensor `kv` (B, Lk, 2, Hkv, D)."""
    k, v = unpacked("kv", kv, 2, "B, L, 2, H, D")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


@check_keywords
@naming(QKV_NAMES)
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` with queries, keys and values in one tensor `qkv` (B, L, 3, H, D)."""
    q, k, v = unpacked("qkv", qkv, 3, "B, L, 3, H, D")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
