"""What torch.utils.flop_counter.FlopCounterMode counts for the ops. Importing this module registers it.

The convention is torch's own for its attention kernels: two operations for each multiply-add of the matrix products,
over all pairs of a query and a key, masked or not; the backward computes the scores once more and has four further
products.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

__all__ = ["backward_flops", "forward_flops"]

Shape = tuple[int, ...]


def forward_flops(query: Shape, key: Shape, value: Shape, output: Shape) -> int:
    """query key^T and weights value, of tensors of these shapes."""
    return 2 * math.prod(output[:-1]) * key[-2] * (query[-1] + value[-1])


def backward_flops(query: Shape, key: Shape, value: Shape, output: Shape) -> int:
    """The scores; grad_output value^T and weights^T grad_output; grad_scores key and grad_scores^T query."""
    return 2 * math.prod(output[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


@register_flop_formula(torch.ops.scaledot.sdpa)  # type: ignore[untyped-decorator]
def _sdpa(query: Shape, key: Shape, value: Shape, *args: Any, out_shape: Any, **kwargs: Any) -> int:
    return forward_flops(query, key, value, out_shape[0])


@register_flop_formula(torch.ops.scaledot.sdpa_backward)  # type: ignore[untyped-decorator]
def _sdpa_backward(
    grad_output: Shape | None,
    grad_lse: Shape | None,
    grad_weights: Shape | None,
    query: Shape,
    key: Shape,
    value: Shape,
    attn_mask: Shape | None,
    alibi_slopes: Shape | None,
    dropout_seed: Shape | None,
    output: Shape,
    *args: Any,
    **kwargs: Any,
) -> int:
    return backward_flops(query, key, value, output)
