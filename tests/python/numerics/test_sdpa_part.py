"""A call for one part of a larger attention (the op's `part`): the parts together give the results of the whole."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import scaledot
from bad_arguments import refused
from cases import Case, Inputs
from kernels_under_test import assert_runs, sdpa
from oracle import solve

ROWS = [slice(0, 33), slice(33, 70)]
KEYS = [slice(0, 41), slice(41, 64), slice(64, 145)]
HEADS = [slice(0, 2), slice(2, 4)]
FIRST_BATCH = 1  # the parts leave out batch entry 0, so that a part also has an offset in the batch


@dataclass(frozen=True)
class Block:
    """The query rows, keys and query heads of one part."""

    rows: slice
    keys: slice
    heads: slice
    group: int  # query heads per KV head

    def of_rows(self, tensor: Tensor) -> Tensor:
        """The block's view of query, output, lse or their gradients, (B, H, Lq, ...)."""
        return tensor[FIRST_BATCH:, self.heads, self.rows]

    def of_keys(self, tensor: Tensor) -> Tensor:
        """The block's view of key, value or their gradients, (B, Hkv, Lk, D)."""
        return tensor[FIRST_BATCH:, self.heads.start // self.group : self.heads.stop // self.group, self.keys]

    def arguments(self, case: Case, inputs: Inputs) -> dict[str, Any]:
        """The arguments of the op for this block, except return_weights."""
        tensors: dict[str, Any] = inputs.tensors()
        tensors["query"] = self.of_rows(inputs.query)
        tensors["key"], tensors["value"] = self.of_keys(inputs.key), self.of_keys(inputs.value)
        if inputs.attn_mask is not None:
            tensors["attn_mask"] = inputs.attn_mask[FIRST_BATCH:, :, :, self.keys]
        if inputs.alibi_slopes is not None:
            tensors["alibi_slopes"] = inputs.alibi_slopes[self.heads]
        # The diagonal of the part replaces causal_alignment.
        lower_right = case.causal_alignment == "lower_right"
        diagonal = self.rows.start - self.keys.start + (case.key_length - case.query_length if lower_right else 0)
        part = [diagonal, self.rows.start, self.keys.start, FIRST_BATCH, self.heads.start, case.heads]
        return {**tensors, **case.options(), "part": part}


CASES = [
    Case("plain", heads=4, kv_heads=4),
    Case("causal", heads=4, kv_heads=2, enable_gqa=True, causal=True, causal_alignment="lower_right"),
    Case(
        "all",
        heads=4,
        kv_heads=4,
        window=(50, 9),
        alibi="H",
        dropout_p=0.3,
        softcap=2.0,
        mask="bool",
        mask_shape="B11K",
    ),
    Case("dropout", heads=4, kv_heads=2, enable_gqa=True, dropout_p=0.4, causal=True),
]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_together_are_the_whole(case: Case, dtype: str, kernel: str) -> None:
    case = case.with_(dtype=dtype, query_length=70, key_length=145)
    inputs, cotangents = case.make(), case.cotangents()
    assert case.heads is not None
    assert case.kv_heads is not None
    assert_runs(kernel, case, inputs)
    group = case.heads // case.kv_heads
    solution, wide = solve(case), torch.float64 if dtype == "float64" else torch.float32

    # Forward. The whole call gives batch entry 0, so that all results can be compared.
    whole = sdpa(case, inputs)
    output, lse = whole[0].to(wide), whole[1].to(wide)
    output[FIRST_BATCH:], lse[FIRST_BATCH:] = torch.nan, torch.nan
    for rows, heads in itertools.product(ROWS, HEADS):
        state: tuple[Tensor, Tensor] | None = None
        for keys in KEYS:
            block = Block(rows, keys, heads, group)
            found, found_lse, _ = torch.ops.scaledot.sdpa(**block.arguments(case, inputs))
            state = scaledot.merge_states(*state, found, found_lse) if state else (found.to(wide), found_lse)
        assert state is not None
        block.of_rows(output).copy_(state[0])
        block.of_rows(lse).copy_(state[1])
    solution.check("output", output.to(case.torch_dtype))
    solution.check("lse", lse)

    # Backward.
    output_mask = [True, True, True, False, False, False]
    options = {**case.options(), "weights": None, "saved": None, "saved_keys": None, "output_mask": output_mask}
    whole_grads = torch.ops.scaledot.sdpa_backward(
        cotangents.output, cotangents.lse, None, **inputs.tensors(), output=whole[0], lse=whole[1], part=None, **options
    )
    names = ("query", "key", "value")
    grads = {name: grad.to(wide) for name, grad in zip(names, whole_grads, strict=False)}
    for grad in grads.values():
        grad[FIRST_BATCH:] = 0
    for rows, keys, heads in itertools.product(ROWS, KEYS, HEADS):
        block = Block(rows, keys, heads, group)
        grad_query, grad_key, grad_value, *_ = torch.ops.scaledot.sdpa_backward(
            block.of_rows(cotangents.output),
            block.of_rows(cotangents.lse),
            None,
            output=block.of_rows(output.to(case.torch_dtype)),
            lse=block.of_rows(lse),
            weights=None,
            saved=None,
            saved_keys=None,
            output_mask=output_mask,
            **block.arguments(case, inputs),
        )
        block.of_rows(grads["query"]).add_(grad_query)
        block.of_keys(grads["key"]).add_(grad_key)
        block.of_keys(grads["value"]).add_(grad_value)
    for name in names:
        solution.check(name, grads[name].to(case.torch_dtype))


def test_a_part_without_offsets_has_the_bits_of_the_whole(kernel: str) -> None:
    case = Case("whole", dropout_p=0.3, causal=True, return_weights=True)
    inputs = case.make()
    assert case.heads is not None
    whole, part = (
        torch.ops.scaledot.sdpa(**inputs.tensors(), **case.options(), return_weights=True, part=part)
        for part in ([], [0, 0, 0, 0, 0, case.heads])
    )
    assert all(torch.equal(a, b) for a, b in zip(whole, part, strict=True))


@pytest.mark.parametrize("part", [[1], [0] * 7, [0, -1, 0, 0, 0, 1], [0, 0, 0, 0, 0, -1]])
def test_bad_parts(part: list[int]) -> None:
    query = torch.randn(1, 2, 3, 4)
    with refused("part", "diagonal", "heads"):
        torch.ops.scaledot.sdpa(query, query, query, part=part)


def test_a_part_has_a_first_derivative_only() -> None:
    query, key, value = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3))
    output, _, _ = torch.ops.scaledot.sdpa(query, key, value, part=[0, 0, 0, 0, 0, 2])
    torch.autograd.grad(output.sum(), query, retain_graph=True)
    with pytest.raises(ValueError, match=r"part: got \[.*\]; needs to be empty for a second derivative"):
        torch.autograd.grad(output.sum(), query, create_graph=True)
    with pytest.raises(ValueError, match=r"part: .* forward mode"):
        torch.func.jvp(
            lambda q: torch.ops.scaledot.sdpa(q, key.detach(), value.detach(), part=[0, 0, 0, 0, 0, 2])[0],
            (query.detach(),),
            (query.detach(),),
        )


def test_opcheck_of_a_part() -> None:
    case = Case("opcheck", dropout_p=0.3, causal=True)
    inputs = case.make().mapped(lambda t: t.clone()).requiring_grad()
    torch.library.opcheck(
        torch.ops.scaledot.sdpa.default,
        (*inputs.tensors().values(),),
        {**case.options(), "part": [3, 5, 2, 1, 1, 7]},
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
