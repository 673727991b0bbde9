"""scaledot's calls over a batch, with keys and values in three layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

import scaledot
from external.engines.workloads import PAGE, Batch


@dataclass(frozen=True)
class Run:
    call: Callable[[], Any]  # what is timed
    output: Callable[[Any], Tensor] = lambda output: output  # from what the call returns to (rows, H, D)
    kept: Any = None  # memory that an engine only points to


def tokens_first(dense: Tensor) -> Tensor:
    """(B, H, L, D) -> (rows, H, D)"""
    return dense.transpose(1, 2).flatten(0, 1)


def options(batch: Batch) -> dict[str, Any]:
    grouped = batch.shape.heads != batch.shape.kv_heads
    return {"is_causal": batch.workload.is_causal, "causal_alignment": "lower_right", "enable_gqa": grouped}


def varlen(batch: Batch, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor | None, **cache: Any) -> Run:
    arguments = query, key, value, batch.row_bounds, bounds, max(batch.rows), max(batch.keys)
    chosen, attend = {**options(batch), **cache}, cast(Any, scaledot.varlen_attention)
    return Run(lambda: attend(*arguments, **chosen))


def exact(batch: Batch) -> Tensor:
    """The output in float64."""
    run = varlen(batch, batch.query.double(), batch.key.double(), batch.value.double(), batch.key_bounds)
    return run.output(run.call())


def packed(batch: Batch) -> Run:
    return varlen(batch, batch.query, batch.key, batch.value, batch.key_bounds)


def pages(batch: Batch, by_head: bool = False) -> Run:
    def pool(tokens: Tensor) -> Tensor:
        """(pages, keys of a page, Hkv, D)"""
        filled = torch.zeros(batch.pages, PAGE, *tokens.shape[1:], dtype=batch.dtype)
        filled.flatten(0, 1)[batch.slots] = tokens
        return filled.transpose(1, 2).contiguous().transpose(1, 2) if by_head else filled

    cache = {"block_table": batch.table, "seqused_k": torch.tensor(batch.keys).int()}
    return varlen(batch, batch.query, pool(batch.key), pool(batch.value), None, **cache)


def per_head(batch: Batch) -> Run:
    """The keys of a head, or of a head in one page, are neighbours."""
    if batch.workload.paged:
        return pages(batch, by_head=True)
    (query, key, value), chosen = batch.dense(), options(batch)
    return Run(lambda: scaledot.scaled_dot_product_attention(query, key, value, **chosen), tokens_first)


LAYOUTS = {"packed": packed, "pages": pages, "per head": per_head}
