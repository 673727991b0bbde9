"""scaled_dot_product_attention of nested tensors of layout torch.jagged, which varlen_attention computes.

A jagged tensor (B, H, j, D) is a view of values (total, H, D) and offsets (B + 1,). With `lengths`, as
torch.nested.narrow gives it, the values also have rows that belong to no sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .varlen import varlen_attention

__all__ = ["any_nested", "jagged_attention", "jagged_explanation"]

# Options of scaled_dot_product_attention that packed sequences do not have, and why.
_DENSE_ONLY = {
    "attn_mask": "each sequence would need a mask of another shape",
    "return_weights": "the weights of each sequence have another shape",
    "block_mask": "each sequence would need another one",
    "score_mod": "score functions need dense tensors",
    "key_indices": "each sequence would need lists of its own",
    "out": "the output of nested tensors is a view of packed rows",
    "masked_score": "there is no boolean attn_mask whose positions would have it",
}


def any_nested(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether one of them is a nested tensor."""
    return query.is_nested or key.is_nested or value.is_nested


@dataclass
class _Packed:
    """The rows of a jagged tensor without gaps."""

    values: Tensor  # (total, H, D)
    cu_seq: Tensor  # (B + 1,)
    longest: int
    rows: Tensor | None  # with gaps: the place of each row in the tensor's own values

    @staticmethod
    def of(tensor: Any) -> _Packed:
        values, offsets, lengths = _by_row(tensor).values(), tensor.offsets(), tensor.lengths()
        if tensor.dim() == 3:
            values = values.unsqueeze(1)
        if lengths is None:
            return _Packed(values, offsets, _longest(tensor, values), None)
        cu_seq = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        shifts = offsets[:-1] - cu_seq[:-1]
        rows = torch.repeat_interleave(shifts, lengths)
        rows = rows + torch.arange(rows.size(0), device=rows.device)
        return _Packed(values[rows], cu_seq, _longest(tensor, values), rows)

    def with_gaps(self, result: Tensor, like: Tensor) -> Tensor:
        """`result` (total, ...) at the rows of `like`; zeros in the gaps."""
        if self.rows is None:
            return result
        whole = result.new_zeros(_by_row(like).values().size(0), *result.shape[1:])
        return whole.index_put((self.rows,), result)


def _by_row(tensor: Tensor) -> Tensor:
    """(B, H, j, D) -> (B, j, H, D), and (B, j, D) as it is."""
    return tensor.transpose(1, 2) if tensor.dim() == 4 else tensor


def _longest(tensor: Any, values: Tensor) -> int:
    """At least the length of the longest sequence. Under torch.compile it must not be read from the offsets."""
    known = tensor._maybe_max_seqlen
    if known is None and not torch.compiler.is_compiling():
        known = tensor._get_max_seqlen() if tensor.size(0) else 0  # which remembers it, and fails for no sequence
    return values.size(0) if known is None else known


def _check_nested(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not tensor.is_nested:
            continue
        if tensor.layout != torch.jagged:
            raise TypeError(
                f"{name}: got a nested tensor of layout {tensor.layout}; needs layout=torch.jagged, or a dense tensor"
            )
        if not query.is_nested:
            raise TypeError(f"{name}: got a nested tensor with a dense query; needs all three nested, or none")
        jagged: Any = tensor
        if tensor.dim() not in (3, 4) or jagged._ragged_idx != tensor.dim() - 2:
            got = ", ".join("j" if d == jagged._ragged_idx else str(n) for d, n in enumerate(tensor.shape))
            raise ValueError(
                f"{name}: got a jagged tensor of shape ({got}), where j differs; needs (B, H, j, D), which is "
                "transpose(1, 2) of (B, j, H, D), or (B, j, D)"
            )
        if tensor.device != query.device:
            raise ValueError(f"{name}: got a tensor on {tensor.device}; needs {query.device}, as query")
        if tensor.is_meta:
            raise ValueError(f"{name}: got a jagged tensor on the device meta; needs one whose lengths can be read")
        if jagged.lengths() is not None and jagged.lengths().dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: got a jagged tensor with lengths of {jagged.lengths().dtype}; needs integers")
        if tensor.dim() != query.dim() or tensor.size(0) != query.size(0):
            got = f"{tensor.dim()} dimensions and a batch of {tensor.size(0)}"
            raise ValueError(f"{name}: got {got}; needs query's, {query.dim()} and {query.size(0)}")
    for name, tensor in (("key", key), ("value", value)):
        if not tensor.is_nested:
            raise TypeError(f"{name}: got a dense tensor with a nested query; needs all three nested, or none")
    if not _same_lengths(key, value):
        raise ValueError("value: got sequences of other lengths than key's; needs the same offsets")


def _same_lengths(key: Any, value: Any) -> bool:
    for ours, other in ((key.offsets(), value.offsets()), (key.lengths(), value.lengths())):
        if ours is not other and (ours is None or other is None or not torch.equal(ours, other)):
            return False
    return True


def _call(
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dense_only: Mapping[str, Any],
    options: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> tuple[_Packed, Any]:
    """Calls `function`, which takes what varlen_attention takes. Returns the packed query too."""
    _check_nested(query, key, value)
    for name, why in _DENSE_ONLY.items():
        given = dense_only.get(name, options.get(name))
        if given is not None and given is not False and not (name == "masked_score" and given == -torch.inf):
            got = "True" if given is True else f"a {type(given).__name__}"
            raise ValueError(f"{name}: got {got} with nested tensors; needs {_default(name)}: {why}")
    packed = {"causal_alignment": "upper_left", **options}
    for name in _DENSE_ONLY:
        packed.pop(name, None)
    q, k, v = _Packed.of(query), _Packed.of(key), _Packed.of(value)
    return q, function(q.values, k.values, v.values, q.cu_seq, k.cu_seq, q.longest, k.longest, **arguments, **packed)


def _default(name: str) -> str:
    return {"return_weights": "False", "masked_score": "-inf"}.get(name, "None")


class _Nested(torch.autograd.Function):
    """nested_tensor_from_jagged; of the function itself torch has no second derivative (seen in torch 2.13)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, like: Tensor, jagged_dim: int) -> Tensor:
        return _from_values(values, like, jagged_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].values(), None, None


def _from_values(values: Tensor, like: Any, jagged_dim: int) -> Tensor:
    result: Tensor = torch.nested.nested_tensor_from_jagged(
        values,
        like.offsets(),
        like.lengths(),
        jagged_dim=jagged_dim,
        min_seqlen=like._maybe_min_seqlen,
        max_seqlen=like._maybe_max_seqlen,
    )
    return result


def _nested_like(values: Tensor, query: Tensor, jagged_dim: int) -> Tensor:
    """A jagged tensor of query's ragged structure."""
    if torch.compiler.is_compiling():
        return _from_values(values, query, jagged_dim)
    result: Tensor = _Nested.apply(values, query.detach(), jagged_dim)  # type: ignore[no-untyped-call]
    return result


def jagged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    return_weights: bool,
    return_lse: bool,
    options: Mapping[str, Any],
    **arguments: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """scaled_dot_product_attention where one of query, key and value is nested, with `arguments` and `options`.

    Returns:
        output (B, H, j, Dv), or (output, lse) with lse (B, H, j), of query's ragged structure. 3-D inputs have no H.
    """
    dense_only = {"attn_mask": attn_mask, "return_weights": return_weights}
    arguments["return_lse"] = return_lse
    packed, results = _call(varlen_attention, query, key, value, dense_only, options, arguments)
    output, lse = results if return_lse else (results, None)
    output = packed.with_gaps(output, query)
    heads = query.dim() == 4
    result = _nested_like(output if heads else output.squeeze(1), query, 1)
    result = result.transpose(1, 2) if heads else result
    if lse is None:
        return result
    by_row = packed.with_gaps(lse.transpose(0, 1), query)
    nested = _nested_like(by_row.transpose(0, 1), query, 2) if heads else _nested_like(by_row.squeeze(1), query, 1)
    return result, nested


def jagged_explanation(
    explain_varlen: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    return_weights: bool,
    options: Mapping[str, Any],
    **arguments: Any,
) -> Any:
    """explain() where one of query, key and value is nested."""
    dense_only = {"attn_mask": attn_mask, "return_weights": return_weights}
    return _call(explain_varlen, query, key, value, dense_only, options, arguments)[1]
