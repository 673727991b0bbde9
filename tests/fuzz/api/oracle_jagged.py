"""scaled_dot_product_attention of nested tensors of layout torch.jagged: each sequence gets what it gets alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuzz.api.oracle import Problem, Results, Values, as_dtype, by_sequence, dropout_seed, laid_out, seeded, split

NESTED = ("query", "key", "value")


class Nested(torch.autograd.Function):
    """nested_tensor_from_jagged, with a second derivative, which torch's own lacks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, like: Any) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(rows, like.offsets(), like.lengths())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0].values(), None


def by_row(tensor: Any) -> Any:
    """(B, H, j, D) -> (B, j, H, D), and (B, j, D) as it is."""
    return tensor.transpose(1, 2) if tensor.dim() == 4 else tensor


def ends(tensor: Any) -> Tensor:
    """0, and the end of each sequence without its gap."""
    lengths = tensor.offsets().diff() if tensor.lengths() is None else tensor.lengths()
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def places(tensor: Any) -> Tensor:
    """The rows of its values that belong to a sequence."""
    begins, sizes = tensor.offsets()[:-1], ends(tensor).diff()
    return torch.cat([torch.arange(n) + first for first, n in zip(begins.tolist(), sizes.tolist(), strict=True)])


def jagged(function: Callable[..., Any], values: Values) -> Problem:
    like = {name: by_row(values[name]) for name in NESTED}
    rows = values | {name: like[name].values().detach() for name in NESTED}
    leaves, given = split(rows, "query key value relative_bias")
    with_heads, drawn, kept = values["query"].dim() == 4, dropout_seed(), places(like["query"])

    def call(**x: Any) -> Results:
        x |= {name: Nested.apply(x[name], like[name]) for name in NESTED}
        x |= {name: x[name].transpose(1, 2) for name in NESTED if with_heads}
        found = function(**x)
        output, *others = found if isinstance(found, tuple) else (found,)
        assert output.is_nested
        assert torch.equal(output.offsets(), like["query"].offsets())
        results = [by_row(output).values()]
        for lse in others:  # (B, H, j) or (B, j)
            results.append((lse.transpose(1, 2) if with_heads else lse).values())
        return tuple(results)

    def theirs(**x: Tensor) -> Results:
        packed = given | {name: laid_out(t, leaves[name]) for name, t in x.items()}
        for name in NESTED:
            packed[name] = packed[name][places(like[name])]
            packed[name] = packed[name] if with_heads else packed[name].unsqueeze(1)
        packed |= {"cu_seq_q": ends(like["query"]), "cu_seq_k": ends(like["key"])}
        packed["causal_alignment"] = given.get("causal_alignment", "upper_left")
        output, lse = by_sequence(packed, drawn)
        results = (output, as_dtype(lse.mT, output.dtype)) if given.get("return_lse") else (output,)
        total = leaves["query"].size(0)
        if not with_heads:
            results = tuple(result.squeeze(1) for result in results)
        return tuple(r.new_zeros(total, *r.shape[1:]).index_put((kept,), r) for r in results)

    return Problem(seeded(call, given, leaves), theirs, leaves)
