"""Continuous batching of transformers (`generate_batch`) through packed sequences and pages."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..varlen import varlen_attention

__all__ = ["KEYWORDS", "paged_attention", "serve"]

_PACKAGE = "transformers.generation.continuous_batching"
KEYWORDS = frozenset(
    {"block_table", "k_cache", "logits_indices", "logits_processor_args", "read_index", "v_cache", "write_index"}
)
"""What models pass to their attention in continuous batching only. `write_index` is never None there."""


def serve(is_ours: Callable[[str | None], bool]) -> None:
    """Lets continuous batching run with the implementations of which `is_ours`, and read pages where a step only
    decodes. transformers has that step for flash-attn on a GPU. Nothing happens before it has been imported.
    """
    api = sys.modules.get(f"{_PACKAGE}.continuous_api")
    setup = sys.modules.get(f"{_PACKAGE}.initialization")
    manager = getattr(api, "ContinuousBatchingManager", None)
    switch = getattr(manager, "switch_to_cb_friendly_attn", None)
    decide = getattr(setup, "ensure_decode_fast_path_is_available", None)
    if switch is None or decide is None or hasattr(switch, "_scaledot"):  # an older version, or served already
        return

    @functools.wraps(switch)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if not is_ours(model.config._attn_implementation):
            switch(self, model, *args, **kwargs)

    @functools.wraps(decide)
    def ensure_decode_fast_path_is_available(config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> None:
        paged = is_ours(config._attn_implementation) and all(
            setup.ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table  # type: ignore[union-attr]
            for kind in setup.group_layers_by_attn_type(config)  # type: ignore[union-attr]
        )
        if not paged:
            decide(config, cb_config, *args, **kwargs)

    switch_to_cb_friendly_attn._scaledot = True  # type: ignore[attr-defined]
    manager.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn  # type: ignore[union-attr]
    setup.ensure_decode_fast_path_is_available = ensure_decode_fast_path_is_available  # type: ignore[union-attr]


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    keywords: Mapping[str, Any],
    *,
    is_causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """(output (1, H, Tq, Dv), lse (1, H, Tq) or None) of the requests that a step packs into one row.

    Args:
        query: (1, H, Tq, D).
        key: (1, Hkv, Tk, D), the cached keys and the new ones; with a `block_table` the new ones only.
        value: the same with Dv for D.
        attention_mask: None.
        keywords: of continuous batching.
        window: a query's own key and those before it that it attends to.
    """
    if attention_mask is not None:
        raise ValueError("attention_mask: got a mask in continuous batching; needs None, because requests are packed")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    cu_seq_q, cu_seq_k, longest_k = keywords["cu_seq_lens_q"], keywords["cu_seq_lens_k"], keywords["max_length_k"]
    paged: dict[str, Any] = {}
    if keywords.get("block_table") is not None:
        # Each request has one new token, whose key and value are not in the cache yet.
        block_table, k_cache, v_cache = keywords["block_table"], keywords["k_cache"], keywords["v_cache"]
        used, page_size = cu_seq_k.diff(), k_cache.size(1)
        last = (used - 1).long()
        pages = block_table.gather(1, (last // page_size)[:, None]).squeeze(1).long()
        k_cache[pages, last % page_size] = k[: last.numel()].to(k_cache.dtype)
        v_cache[pages, last % page_size] = v[: last.numel()].to(v_cache.dtype)
        k, v, cu_seq_k, longest_k = k_cache, v_cache, None, block_table.size(1) * page_size
        paged = {"block_table": block_table, "seqused_k": used}
    rows = int(cu_seq_q[-1])  # a compiled step pads them
    result = varlen_attention(
        q[:rows],
        k,
        v,
        cu_seq_q,
        cu_seq_k,
        int(keywords["max_length_q"]),
        int(longest_k),
        is_causal,
        scale=scale,
        enable_gqa=key.size(1) != query.size(1),
        window=None if window is None else (window - 1, 0 if is_causal else window - 1),
        softcap=softcap,
        return_lse=return_lse,
        **paged,
    )
    output, lse = result if return_lse else (result, None)
    if rows < q.size(0):
        output = torch.cat([output, output.new_zeros(q.size(0) - rows, *output.shape[1:])])
        lse = None if lse is None else torch.cat([lse, lse.new_zeros(lse.size(0), q.size(0) - rows)], 1)
    return output.transpose(0, 1).unsqueeze(0), None if lse is None else lse.unsqueeze(0)
