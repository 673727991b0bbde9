"""The strides of an output, for functions that stand in for one whose output has those of query."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["nested_like_query", "strides_like_query"]


def strides_like_query(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
    """Options of scaled_dot_product_attention: its output's dimensions are nested in memory as those of query, except
    that the last one is innermost. None where query is not a plain tensor (B, H, L, D) of the output's B and H.
    """
    if not all(type(tensor) is Tensor and tensor.dim() == 4 for tensor in (query, key, value)):
        return {}
    for d in (0, 1):
        if query.size(d) < key.size(d) or query.size(d) < value.size(d):
            return {}
    given, strides = query.stride(), [1, 1, 1, 1]
    for d in range(3):  # torch.compile cannot sort symbolic numbers, but compares them
        strides[d] = value.size(3)
        for other in range(3):
            if given[other] < given[d] or (given[other] == given[d] and other < d):
                strides[d] *= query.size(other) or 1
    return {"_output_strides": strides}


def nested_like_query(output: Tensor, query: Tensor) -> Tensor:
    """The output (..., L, H, D), copied to have its heads outside of its rows in memory where query has them so."""
    if query.size(-3) < 2 or query.size(-2) < 2 or query.stride(-3) >= query.stride(-2):
        return output
    return output.transpose(-3, -2).contiguous().transpose(-3, -2)
