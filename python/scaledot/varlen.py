"""varlen_attention: torch.nn.attention.varlen.varlen_attn on every device, with the options that it lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from .functional import Window, any_dtensor, draw_seed, window_sides

__all__ = ["varlen_attention"]

_varlen = torch.ops.scaledot.varlen.default


def varlen_window_sides(window_size: object, window: object) -> tuple[Any, Any]:
    """The two sides of torch's `window_size`, where -1 says that there is no limit, or of `window`, where None does."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size: got {window_size!r}; needs a pair (left, right) of integers, -1 for no limit")
    if window is not None:
        if tuple(window_size) != (-1, -1):
            raise ValueError(f"window: got {window!r} beside window_size={window_size!r}; needs one of the two")
        return window_sides(window)
    left, right = window_sides(tuple(window_size))
    return None if left == -1 else left, None if right == -1 else right


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    dropout_p: float = 0.0,
    causal_alignment: str = "lower_right",
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    r"""Attention over N sequences of different lengths, packed one after the other without padding.

    The arguments up to `num_splits` are those of :func:`torch.nn.attention.varlen.varlen_attn` (torch 2.13), in its
    order and with its meaning; `is_causal` stands where torch 2.10 had it. Sequence b has the query rows
    cu_seq_q[b]:cu_seq_q[b + 1] and the key rows cu_seq_k[b]:cu_seq_k[b + 1], and gets what
    :func:`scaledot.scaled_dot_product_attention` gives for these rows alone, bit for bit on a CPU: no other sequence in
    the batch and no number of threads changes it. Nothing is padded, and nothing of size Lq * Lk is kept.

    Args:
        query: (Tq, H, D): float32, float64, bfloat16 or float16, with any strides.
        key: (Tk, Hkv, D), or with `block_table` a pool of pages (pages, page_size, Hkv, D).
        value: (Tk, Hkv, Dv), or (pages, page_size, Hkv, Dv); Dv may differ from D.
        cu_seq_q: (N + 1,), int32 or int64, on query's device: 0, and then where each sequence ends; the last is Tq.
        cu_seq_k: the same for keys, the last is Tk; None with `block_table`.
        max_q: at least the longest sequence's number of queries. On a GPU it sizes the launch, on a CPU it is checked.
        max_k: at least the largest number of keys that a sequence attends to.
        is_causal: row i of a sequence attends to its keys up to the one that `causal_alignment` aligns it with.
        return_aux: a torch.nn.attention.varlen.AuxRequest (or anything with a bool `lse`), as torch takes it;
            AuxRequest(lse=True) is return_lse=True.
        scale: a finite number; default 1 / sqrt(D).
        window_size: (left, right) as torch spells it: -1 = unbounded; (-1, 0) is causal.
        enable_gqa: H may be a multiple of Hkv: query head h attends to key and value head h // (H // Hkv).
        seqused_k: (N,), int32 or int64: how many of its keys each sequence has; what lies behind them is not looked at.
            Keys left out have gradient 0.
        block_table: (N, pages of a sequence), int32 or int64: key j of sequence b is row j % page_size of page
            block_table[b, j // page_size]. Needs `seqused_k`; has no gradient. On a CPU, keys and values are read in
            their pages, of any size and in any order: decoding and prefill never gather them in other memory.
        num_splits: in how many parts at most a GPU cuts the keys of a sequence. 1: results do not depend on the other
            sequences; None: it depends on max_k. A CPU's results never depend on them.
        dropout_p: in [0, 1), as in scaled_dot_product_attention. The seed is drawn from torch's generator; with the
            seed (s, t), sequence b drops what scaled_dot_product_attention drops for the seed (s, t + b).
        causal_alignment: the diagonal that `is_causal`, windows and ALiBi count from, in each sequence: "lower_right"
            (torch's: the last query row is aligned with the last key) or "upper_left". Note that
            scaled_dot_product_attention has the other default, because torch has.
        window: (left, right), at least 0, None = unbounded: `window_size` as scaled_dot_product_attention spells it.
        softcap: > 0: scores are squashed into (-softcap, softcap) by tanh.
        alibi_slopes: (H,) or (N, H): adds -slope * |distance|.
        return_lse: also return lse, which is differentiable.

    Returns:
        output (Tq, H, Dv) in query's dtype, or (output, lse) with lse (H, Tq), float32 (float64 for float64): the log
        of the sum of exp(score). A row without keys has output 0 and lse -inf.

    Raises:
        ValueError, TypeError: naming the argument. On a CPU cu_seq_q, cu_seq_k, seqused_k, block_table, max_q and max_k
            are checked against each other. On a GPU this would mean to wait for it, so it is not done: wrong numbers
            give wrong results (but no access outside of the tensors), and rows that belong to no sequence are not
            written.

    Gradients reach query, key and value. The double backward and forward mode are made of one call for each sequence,
    and wait for the device to know the lengths. torch.vmap over any of the tensors makes of its samples further
    sequences of one call: each sample gets bit for bit what it gets alone on a CPU, dropout included. What is not
    batched is repeated in memory for it, but for pages of keys and values.

    Example:
        >>> import torch, scaledot
        >>> query, key, value = torch.randn(3, 7, 8, 64).unbind()   # 7 tokens: sequences of 3 and 4
        >>> cu_seq = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> scaledot.varlen_attention(query, key, value, cu_seq, cu_seq, 4, 4, window_size=(-1, 0)).shape
        torch.Size([7, 8, 64])
    """
    if has_torch_function_variadic(query, key, value, cu_seq_q, cu_seq_k, seqused_k, block_table, alibi_slopes):
        return handle_torch_function(
            varlen_attention,
            (query, key, value, cu_seq_q, cu_seq_k, seqused_k, block_table, alibi_slopes),
            query,
            key,
            value,
            cu_seq_q,
            cu_seq_k,
            max_q,
            max_k,
            is_causal,
            return_aux=return_aux,
            scale=scale,
            window_size=window_size,
            enable_gqa=enable_gqa,
            seqused_k=seqused_k,
            block_table=block_table,
            num_splits=num_splits,
            dropout_p=dropout_p,
            causal_alignment=causal_alignment,
            window=window,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            return_lse=return_lse,
        )
    left, right = varlen_window_sides(window_size, window)
    seed = draw_seed(query) if dropout_p else None
    tensors: tuple[Tensor | None, ...]
    tensors = (query, key, value, cu_seq_q, cu_seq_k, seqused_k, block_table, alibi_slopes, seed)
    if type(query) is not Tensor and any_dtensor(query, key, value):
        from .distributed.varlen_sharding import on_varlen_dtensors

        tensors = on_varlen_dtensors(tensors, dropout_p)
    output, lse = _varlen(
        *tensors,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        causal_alignment,
        left,
        right,
        softcap,
        num_splits=num_splits,
    )
    return (output, lse) if return_lse or (return_aux is not None and return_aux.lse) else output
