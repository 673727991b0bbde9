"""FLOPs that torch.utils.flop_counter.FlopCounterMode counts for the ops.

The formulas are registered when torch.utils.flop_counter is imported. `import scaledot` does not import it: that would
load triton, which takes long and turns the global interpreter lock of a free-threaded Python on.

The convention is torch's own for its attention kernels: two operations for each multiply-add of the matrix products,
over all pairs of a query and a key, masked or not. The backward computes the scores once more and has four further
products. Packed sequences count by their own lengths; fake and meta tensors have none, so there each sequence counts as
one of max_q rows and max_k keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .._load import OPS
from .on_import import on_import
from .schema import given

__all__ = ["backward_flops", "forward_flops"]


def forward_flops(pairs: int, head_dim: int, value_dim: int) -> int:
    """query key^T and weights value; `pairs`: of a query and a key, in all heads."""
    return 2 * pairs * (head_dim + value_dim)


def backward_flops(pairs: int, head_dim: int, value_dim: int) -> int:
    """The scores; grad_output value^T and weights^T grad_output; grad_scores key and grad_scores^T query."""
    return 2 * pairs * (3 * head_dim + 2 * value_dim)


def _keys(shapes: Mapping[str, Any]) -> int:
    """The number of keys of a row: those of its list, or all."""
    lists = shapes.get("key_indices")
    return int(shapes["key"][-2] if lists is None else lists[-1])


def _sdpa(*args: Any, out_shape: Any, **kwargs: Any) -> int:  # for sdpa_recorded too, which has the same tensors
    shapes, (output, *_) = given(OPS.sdpa.default, args, kwargs), out_shape
    return forward_flops(math.prod(output[:-1]) * _keys(shapes), shapes["query"][-1], shapes["value"][-1])


def _sdpa_out(*args: Any, out_shape: Any, **kwargs: Any) -> int:
    shapes = given(OPS.sdpa_out.default, args, kwargs)
    return _sdpa(**shapes, out_shape=(shapes["out"],))


def _sdpa_backward(*args: Any, out_shape: Any, **kwargs: Any) -> int:
    shapes = given(OPS.sdpa_backward.default, args, kwargs)
    pairs = math.prod(shapes["output"][:-1]) * _keys(shapes)
    return backward_flops(pairs, shapes["query"][-1], shapes["value"][-1])


def _varlen(*args: Any, out_val: Any, **kwargs: Any) -> int:
    call = given(OPS.varlen.default, args, kwargs)
    return forward_flops(_pairs(call), call["query"].size(-1), call["value"].size(-1))


def _varlen_out(*args: Any, **kwargs: Any) -> int:
    return _varlen(**given(OPS.varlen_out.default, args, kwargs))


def _varlen_backward(*args: Any, out_val: Any, **kwargs: Any) -> int:
    call = given(OPS.varlen_backward.default, args, kwargs)
    return backward_flops(_pairs(call), call["query"].size(-1), call["value"].size(-1))


def _pairs(call: Mapping[str, Any]) -> int:
    """Pairs of a query and a key, in all sequences and heads together."""
    from torch._subclasses.fake_tensor import FakeTensor  # not with `import scaledot`: it takes long to load
    from torch._subclasses.functional_tensor import FunctionalTensor

    cu_seq_q, heads = call["cu_seq_q"], call["query"].size(1)
    if isinstance(cu_seq_q, (FakeTensor, FunctionalTensor)) or cu_seq_q.is_meta:
        return heads * (cu_seq_q.size(0) - 1) * call["max_q"] * call["max_k"]
    keys = call["cu_seq_k"].diff() if call["seqused_k"] is None else call["seqused_k"]
    return heads * sum(q * k for q, k in zip(cu_seq_q.diff().tolist(), keys.tolist(), strict=True))


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    # A formula gets shapes in place of tensors, or with get_raw=True the tensors themselves.
    register_flop_formula([OPS.sdpa, OPS.sdpa_recorded])(_sdpa)
    register_flop_formula(OPS.sdpa_out)(_sdpa_out)
    register_flop_formula(OPS.sdpa_backward)(_sdpa_backward)
    register_flop_formula([OPS.varlen, OPS.varlen_recorded], get_raw=True)(_varlen)
    register_flop_formula(OPS.varlen_out, get_raw=True)(_varlen_out)
    register_flop_formula(OPS.varlen_backward, get_raw=True)(_varlen_backward)


on_import("torch.utils.flop_counter", _register)
