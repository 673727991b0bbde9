"""What torch.utils.flop_counter.FlopCounterMode counts for the ops. Importing this module registers it.

The convention is torch's own for its attention kernels: two operations for each multiply-add of the matrix products,
over all pairs of a query and a key, masked or not; the backward computes the scores once more and has four further
products. Packed sequences count as their own lengths say; where these are not known (fake and meta tensors), each
counts as one of max_q rows and max_k keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

__all__ = ["backward_flops", "forward_flops"]

Shape = tuple[int, ...]


def forward_flops(pairs: int, head_dim: int, value_dim: int) -> int:
    """query key^T and weights value, for so many pairs of a query and a key in all heads."""
    return 2 * pairs * (head_dim + value_dim)


def backward_flops(pairs: int, head_dim: int, value_dim: int) -> int:
    """The scores; grad_output value^T and weights^T grad_output; grad_scores key and grad_scores^T query."""
    return 2 * pairs * (3 * head_dim + 2 * value_dim)


@register_flop_formula(torch.ops.scaledot.sdpa)  # type: ignore[untyped-decorator]
def _sdpa(query: Shape, key: Shape, value: Shape, *args: Any, out_shape: Any, **kwargs: Any) -> int:
    return forward_flops(math.prod(out_shape[0][:-1]) * key[-2], query[-1], value[-1])


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
    return backward_flops(math.prod(output[:-1]) * key[-2], query[-1], value[-1])


def _pairs(
    query: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, seqused_k: Tensor | None, max_q: int, max_k: int
) -> int:
    """Pairs of a query and a key, in all sequences and heads together."""
    from torch._subclasses.fake_tensor import FakeTensor  # not with `import scaledot`: it takes long to load
    from torch._subclasses.functional_tensor import FunctionalTensor

    heads = query.size(1)
    if isinstance(cu_seq_q, (FakeTensor, FunctionalTensor)) or cu_seq_q.is_meta:
        return heads * (cu_seq_q.size(0) - 1) * max_q * max_k
    if seqused_k is not None:
        keys = seqused_k
    else:
        assert cu_seq_k is not None  # the op has seen to that
        keys = cu_seq_k.diff()
    return heads * sum(q * k for q, k in zip(cu_seq_q.diff().tolist(), keys.tolist(), strict=True))


@register_flop_formula(torch.ops.scaledot.varlen, get_raw=True)  # type: ignore[untyped-decorator]
def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_seed: Tensor | None,
    max_q: int,
    max_k: int,
    *args: Any,
    **kwargs: Any,
) -> int:
    pairs = _pairs(query, cu_seq_q, cu_seq_k, seqused_k, max_q, max_k)
    return forward_flops(pairs, query.size(-1), value.size(-1))


@register_flop_formula(torch.ops.scaledot.varlen_backward, get_raw=True)  # type: ignore[untyped-decorator]
def _varlen_backward(
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_seed: Tensor | None,
    output: Tensor,
    lse: Tensor,
    max_q: int,
    max_k: int,
    *args: Any,
    **kwargs: Any,
) -> int:
    pairs = _pairs(query, cu_seq_q, cu_seq_k, seqused_k, max_q, max_k)
    return backward_flops(pairs, query.size(-1), value.size(-1))
