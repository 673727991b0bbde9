"""A call that is part of a larger attention (the op's `part`): all parts together are the whole, on every kernel."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import scaledot
from bad_arguments import refused
from cases import Case, Inputs
from kernels_under_test import assert_runs, sdpa
from oracle import solve

ROWS = [(0, 33), (33, 70)]
KEYS = [(0, 41), (41, 64), (64, 145)]
Part = list[int]


def cut(case: Case, inputs: Inputs, rows: tuple[int, int], keys: tuple[int, int], heads: slice) -> tuple[Any, Part]:
    """The arguments of one part, and where it lies."""
    assert case.heads is not None
    of_keys = slice(heads.start // (case.heads // case.kv_heads), heads.stop // (case.heads // case.kv_heads))
    arguments: dict[str, Any] = inputs.tensors()
    arguments["query"] = inputs.query[1:, heads, rows[0] : rows[1]]
    arguments["key"] = inputs.key[1:, of_keys, keys[0] : keys[1]]
    arguments["value"] = inputs.value[1:, of_keys, keys[0] : keys[1]]
    if inputs.attn_mask is not None:
        arguments["attn_mask"] = inputs.attn_mask[1:, :, :, keys[0] : keys[1]]
    if inputs.alibi_slopes is not None:
        arguments["alibi_slopes"] = inputs.alibi_slopes[heads]
    options = case.options()  # its causal_alignment gives way to the part
    lower_right = case.causal_alignment == "lower_right"
    diagonal = rows[0] - keys[0] + (case.key_length - case.query_length if lower_right else 0)
    return {**arguments, **options}, [diagonal, rows[0], keys[0], 1, heads.start, case.heads]


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
def test_parts_are_the_whole(case: Case, dtype: str, kernel: str) -> None:
    case = case.with_(dtype=dtype, query_length=70, key_length=145)
    inputs, cotangents = case.make(), case.cotangents()
    assert_runs(kernel, case, inputs)
    solution, wide = solve(case), torch.float64 if dtype == "float64" else torch.float32
    grads = {n: torch.zeros(getattr(inputs, n).shape, dtype=wide) for n in ("query", "key", "value")}
    output, lse = (torch.empty(shape, dtype=wide) for shape in (case.output_shape, case.output_shape[:-1]))
    whole = sdpa(case, inputs)
    output[0], lse[0] = whole[0][0], whole[1][0]
    heads_of = [slice(0, 2), slice(2, 4)]
    for rows, heads in itertools.product(ROWS, heads_of):
        state: tuple[Tensor, Tensor] | None = None
        for keys in KEYS:
            arguments, part = cut(case, inputs, rows, keys, heads)
            found, found_lse, _ = torch.ops.scaledot.sdpa(**arguments, part=part)
            state = scaledot.merge_states(*state, found, found_lse) if state else (found.to(wide), found_lse)
        assert state is not None
        output[1:, heads, rows[0] : rows[1]], lse[1:, heads, rows[0] : rows[1]] = state
    solution.check("output", output.to(case.torch_dtype))
    solution.check("lse", lse)
    group = case.heads // case.kv_heads
    for rows, keys, heads in itertools.product(ROWS, KEYS, heads_of):
        arguments, part = cut(case, inputs, rows, keys, heads)
        of_rows = slice(*rows)
        piece = torch.ops.scaledot.sdpa_backward(
            cotangents.output[1:, heads, of_rows],
            cotangents.lse[1:, heads, of_rows],
            None,
            output=output.to(case.torch_dtype)[1:, heads, of_rows],
            lse=lse[1:, heads, of_rows],
            weights=None,
            output_mask=[True, True, True, False],
            part=part,
            **arguments,
        )
        of_keys = slice(heads.start // group, heads.stop // group)
        grads["query"][1:, heads, of_rows] += piece[0]
        grads["key"][1:, of_keys, slice(*keys)] += piece[1]
        grads["value"][1:, of_keys, slice(*keys)] += piece[2]
    # The other sequence, whole, so that what is compared is all there.
    alone = torch.ops.scaledot.sdpa_backward(
        cotangents.output, cotangents.lse, None, **inputs.tensors(), output=whole[0], lse=whole[1], weights=None,
        part=None, output_mask=[True, True, True, False], **case.options(),
    )  # fmt: skip
    for (name, grad), whole_grad in zip(grads.items(), alone, strict=False):
        grad[0] = whole_grad[0]
        solution.check(name, grad.to(case.torch_dtype))


def test_a_part_that_is_all_there_is_is_the_whole(kernel: str) -> None:
    case = Case("whole", dropout_p=0.3, causal=True, return_weights=True)
    inputs = case.make()
    assert case.heads is not None
    whole, part = (
        torch.ops.scaledot.sdpa(**inputs.tensors(), **case.options(), return_weights=True, part=part)
        for part in ([], [0, 0, 0, 0, 0, case.heads])
    )
    assert all(torch.equal(a, b) for a, b in zip(whole, part, strict=True))


@pytest.mark.parametrize("part", [[1], [0] * 7, [0, -1, 0, 0, 0, 1], [0, 0, 0, 0, 0, -1]])
def test_bad_parts(part: Part) -> None:
    query = torch.randn(1, 2, 3, 4)
    with refused("part", "diagonal", "heads"):
        torch.ops.scaledot.sdpa(query, query, query, part=part)


def test_a_part_has_a_first_derivative_only() -> None:
    query, key, value = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3))
    output, _, _ = torch.ops.scaledot.sdpa(query, key, value, part=[0, 0, 0, 0, 0, 2])
    torch.autograd.grad(output.sum(), query, retain_graph=True)
    with pytest.raises(ValueError, match=r"part: .* first derivative only"):
        torch.autograd.grad(output.sum(), query, create_graph=True)
    with pytest.raises(ValueError, match=r"part: .* forward mode"):
        torch.func.jvp(
            lambda q: torch.ops.scaledot.sdpa(q, key.detach(), value.detach(), part=[0, 0, 0, 0, 0, 2])[0],
            (query.detach(),),
            (query.detach(),),
        )


def test_opcheck() -> None:
    case = Case("opcheck", dropout_p=0.3, causal=True)
    inputs = case.make().mapped(lambda t: t.clone()).requiring_grad()
    torch.library.opcheck(
        torch.ops.scaledot.sdpa.default,
        (*inputs.tensors().values(),),
        {**case.options(), "part": [3, 5, 2, 1, 1, 7]},
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
