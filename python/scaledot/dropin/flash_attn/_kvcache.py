"""flash_attn_with_kvcache: appends to a cache of keys and values, and attends to it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..._checks import as_integer, described, flag, integer, require_dense, require_tensors
from ..._keywords import NoOptions, hide_unknown, unknown_keyword
from ...varlen import varlen_attention
from .._strides import nested_like_query
from ._options import NAMES, check_qkv, options, renamed
from ._rotary import check_rotary, rotate

__all__ = ["flash_attn_with_kvcache"]


_NAMES = NAMES | {"key": "k_cache", "value": "v_cache", "seqused_k": "cache_seqlens"}


@torch.no_grad()
@hide_unknown
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    **unknown: Unpack[NoOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """flash-attn's function of this name. It has no gradient: its results require none.

    Args:
        q: (B, Lq, H, D): float32, float64, bfloat16 or float16.
        k_cache: (cache rows, Lcache, Hkv, D), at least B rows, where Hkv divides H; with `block_table` pages (pages,
            page_size, Hkv, D), of any size. It is read in place.
        v_cache: the same with Dv for D.
        k: (B, Lnew, Hkv, D), new keys, which are written into k_cache from position cache_seqlens on.
        v: (B, Lnew, Hkv, Dv), new values.
        rotary_cos: (rows, R / 2) in q's dtype, with at least as many rows as a sequence can have keys. Rotates the
            first R dimensions of k and q, by position in the cache. Queries are at cache_seqlens, cache_seqlens + 1,
            ... if causal or with a window, otherwise all at cache_seqlens. Needs k.
        rotary_sin: the same for the sine.
        cache_seqlens: how many positions of the cache each sequence uses before k is appended: an int, or (B,), int32
            or int64. None: all of them. Needed with k.
        cache_batch_idx: (B,), int32 or int64: the cache row of each sequence; default b. Not with `block_table`. With k
            the rows are all different.
        cache_leftpad: (B,), int32 or int64: the first position of each sequence in its row. Not with `block_table`.
        block_table: (B, pages of a sequence), int32 or int64.
        softmax_scale, causal, window_size, softcap: as in :func:`flash_attn_func`.
        rotary_interleaved: rotate dimensions 0 and 1, 2 and 3, ...; otherwise 0 and R / 2, 1 and R / 2 + 1, ...
        alibi_slopes: (H,) or (B, H).
        num_splits: the most parts into which a GPU may cut the keys of a sequence; 0: it depends on the shape. Results
            on a CPU do not depend on it.
        return_softmax_lse: also return softmax_lse.

    Returns:
        out (B, Lq, H, Dv), or (out, softmax_lse). softmax_lse is (B, H, Lq), float32 (float64 for float64).

    Raises:
        ValueError, TypeError: shapes, dtypes or options that do not fit. The message names the argument. A CPU checks
            that the cache has room for k.

    Example:
        >>> import torch
        >>> from scaledot.dropin.flash_attn import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 3, 128, 8, 64).unbind()   # 3 sequences of at most 128 tokens
        >>> cache_seqlens = torch.tensor([5, 17, 90], dtype=torch.int32)
        >>> q, k, v = torch.randn(3, 3, 1, 8, 64).unbind()              # one new token of each
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, causal=True).shape
        torch.Size([3, 1, 8, 64])
    """
    if unknown:
        raise unknown_keyword(flash_attn_with_kvcache, *unknown)
    cache_dims = "cache rows, L, H, D" if block_table is None else "pages, page_size, H, D"
    check_qkv("B, L, H, D", q, k_cache, v_cache, cache_dims, ("q", "k_cache", "v_cache"))
    arguments = options(q, k_cache, softmax_scale, causal, window_size, softcap, alibi_slopes)
    arguments["num_splits"] = _splits(num_splits)
    flag("return_softmax_lse", return_softmax_lse)
    flag("rotary_interleaved", rotary_interleaved)
    tensors = {
        "k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad, "block_table": block_table, "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    if isinstance(cache_seqlens, Tensor):
        tensors["cache_seqlens"] = cache_seqlens
    require_dense(q=q, **{name: tensor for name, tensor in tensors.items() if tensor is not None})
    pages, page_size, capacity = _pages(q, k_cache, cache_batch_idx, cache_leftpad, block_table)
    used = _lengths(cache_seqlens, q.size(0), capacity, q.device)
    rotary = rotary_cos is not None or rotary_sin is not None
    if k is not None or v is not None:
        positions = _new_positions(q, k, v, k_cache, v_cache, cache_seqlens, used, capacity)
        if rotary:
            local = any(side is not None and side < capacity for side in arguments["window"] or ())
            steps = torch.arange(q.size(1), device=q.device) * int(causal or local)
            places = used[:, None] + steps
            cos, sin = check_rotary(q, rotary_cos, rotary_sin, capacity, places)
            q = rotate(q, cos, sin, places, rotary_interleaved)
            k = rotate(cast(Tensor, k), cos, sin, positions, rotary_interleaved)
        where = pages.gather(1, positions // page_size), positions % page_size
        _check_range("block_table", where[0], 0, k_cache.size(0) - 1)
        k_cache[where], v_cache[where] = cast(Tensor, k), cast(Tensor, v)
        used = used + positions.size(1)
    elif rotary:
        raise ValueError("rotary_cos: got tables without k; needs the new keys k and values v as well")
    try:
        out, lse = _attend(q, k_cache, v_cache, used, pages, page_size, cache_leftpad, arguments)
    except (TypeError, ValueError) as error:
        raise renamed(error, _NAMES) from None
    return (out, lse) if return_softmax_lse else out


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    used: Tensor,
    pages: Tensor,
    page_size: int,
    leftpad: Tensor | None,
    arguments: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """(out, lse) of varlen_attention over a cache in pages."""
    batch, length = q.shape[:2]
    if leftpad is not None:  # the keys of a sequence start within its page: every position is a page
        offsets = torch.arange(page_size, device=q.device) + leftpad[:, None]
        pages = pages * page_size + offsets.clamp(max=page_size - 1)
        k_cache, v_cache = (cache.flatten(0, 1).unsqueeze(1) for cache in (k_cache, v_cache))
        used, page_size = (used - leftpad).clamp(min=0), 1
    out, lse = varlen_attention(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        torch.arange(batch + 1, device=q.device, dtype=torch.int32) * length,
        None,
        length,
        pages.size(1) * page_size,
        seqused_k=used,
        block_table=pages,
        return_lse=True,
        **arguments,
    )
    out = nested_like_query(out.unflatten(0, (batch, length)), q)
    return out, lse.unflatten(1, (batch, length)).transpose(0, 1).contiguous()


def _pages(
    q: Tensor, k_cache: Tensor, rows: Tensor | None, leftpad: Tensor | None, block_table: Tensor | None
) -> tuple[Tensor, int, int]:
    """(the pages of each sequence, (B, n) int64; the size of a page; the most keys of a sequence)."""
    batch, page_size = q.size(0), k_cache.size(1)
    if block_table is not None:
        for name, other in (("cache_batch_idx", rows), ("cache_leftpad", leftpad)):
            if other is not None:
                raise ValueError(f"{name}: got a tensor together with block_table; needs one of the two")
        require_tensors(block_table=block_table)
        if block_table.dim() != 2 or block_table.size(0) != batch:
            raise ValueError(f"block_table: got shape {tuple(block_table.shape)}; needs ({batch}, pages)")
        return block_table.long(), page_size, block_table.size(1) * page_size
    if leftpad is not None:
        _check_vector("cache_leftpad", leftpad, batch)
        _check_range("cache_leftpad", leftpad, 0, None)
    if rows is None:
        if k_cache.size(0) < batch:
            raise ValueError(f"k_cache: got {k_cache.size(0)} rows; needs at least {batch}, one for each row of q")
        rows = torch.arange(batch, device=q.device)
    else:
        _check_vector("cache_batch_idx", rows, batch)
        _check_range("cache_batch_idx", rows, 0, k_cache.size(0) - 1)
    return rows.long()[:, None], page_size, page_size


def _check_vector(name: str, value: Tensor, batch: int) -> None:
    require_tensors(**{name: value})
    if value.shape != (batch,) or value.dtype not in (torch.int32, torch.int64):
        got = f"{value.dtype} of shape {tuple(value.shape)}"
        raise ValueError(f"{name}: got {got}; needs torch.int32 or torch.int64 of ({batch},)")


def _check_range(name: str, value: Tensor, least: int, most: int | None) -> None:
    """Raises an error for a number that is too small or too large. It is not looked at on a GPU."""
    if value.is_cuda or torch.compiler.is_compiling() or not value.numel():
        return
    low, high = (int(limit) for limit in value.aminmax())
    if low < least or (most is not None and high > most):
        needs = f"at least {least}" if most is None else f"numbers from {least} to {most}"
        raise ValueError(f"{name}: got numbers from {low} to {high}; needs {needs}")


def _lengths(cache_seqlens: int | Tensor | None, batch: int, capacity: int, device: torch.device) -> Tensor:
    """(B,), int64."""
    if isinstance(cache_seqlens, Tensor):
        _check_vector("cache_seqlens", cache_seqlens, batch)
        _check_range("cache_seqlens", cache_seqlens, 0, capacity)
        return cache_seqlens.long()
    length = capacity if cache_seqlens is None else as_integer(cache_seqlens)
    if length is None:
        got = described(cache_seqlens)
        raise TypeError(f"cache_seqlens: got {got}; needs an integer, a tensor of integers or None")
    if not 0 <= length <= capacity:
        raise ValueError(f"cache_seqlens: got {described(length)}; needs 0 to {capacity}, the size of the cache")
    return torch.full((batch,), length, dtype=torch.int64, device=device)


def _new_positions(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: int | Tensor | None,
    used: Tensor,
    capacity: int,
) -> Tensor:
    """The positions of the new keys, (B, Lnew) int64, after their checks."""
    require_tensors(k=k, v=v)
    assert k is not None
    assert v is not None
    if cache_seqlens is None:
        raise ValueError("cache_seqlens: got None with k; needs the position of the first new key")
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = (q.size(0), k.size(1) if k.dim() == 4 else "L", *cache.shape[2:])
        if tuple(new.shape) != wanted:
            raise ValueError(f"{name}: got shape {tuple(new.shape)}; needs {wanted}")
        if new.dtype != q.dtype:
            raise TypeError(f"{name}: got {new.dtype}; needs {q.dtype}, as q")
    if not used.is_cuda and not torch.compiler.is_compiling() and used.numel():
        first, last = int(used.min()), int(used.max())
        if first < 0 or last + k.size(1) > capacity:
            got = f"lengths from {first} to {last} with {k.size(1)} new keys"
            raise ValueError(f"cache_seqlens: got {got}; needs room for them in a cache of {capacity}")
    return used[:, None] + torch.arange(k.size(1), device=q.device)


def _splits(num_splits: Any) -> int | None:
    splits: int = integer("num_splits", num_splits)
    return splits if splits > 0 else None
