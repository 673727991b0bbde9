"""attn_mask of packed sequences: a draft tree over each sequence's last keys, or biases of them.

test_varlen, test_varlen_pages and test_varlen_torch compare calls with such masks bit for bit with dense ones (the
features "tree" of varlen_cases), and check gradients. This file has what only such masks have.
"""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import scaledot
from bad_arguments import refused
from kernels_under_test import FEW_ROWS, forced
from quantised_cache import CACHES, LENGTHS, check_rule, make, paged
from varlen_cases import cumulative, dense_mask
from varlen_samples import CU_K, CU_Q, KEYS, ROWS, SAMPLES, assert_bits, calls, looped, normal, qkv

attend: Any = scaledot.varlen_attention
dense: Any = scaledot.scaled_dot_product_attention

# Drafted tokens: each one's parent in the tree, -1 for the last accepted token.
PARENTS = (-1, 0, 0, 1, 1, 2, 4, 4, 3)


def path_to(token: int) -> list[int]:
    """The token's ancestors, from the root, and itself."""
    return [] if token < 0 else [*path_to(PARENTS[token]), token]


def tree() -> Tensor:
    attends = torch.zeros(len(PARENTS), len(PARENTS), dtype=torch.bool)
    for token in range(len(PARENTS)):
        attends[token, path_to(token)] = True
    return attends


def packed(rows: tuple[int, ...], keys: tuple[int, ...], heads: int = 4, kv_heads: int = 2) -> dict[str, Any]:
    query = torch.randn(sum(rows), heads, 24, dtype=torch.float64)
    key, value = (torch.randn(sum(keys), kv_heads, 24, dtype=torch.float64) for _ in range(2))
    return dict(
        query=query, key=key, value=value, cu_seq_q=cumulative(rows), cu_seq_k=cumulative(keys), max_q=max(rows),
        max_k=max(keys), enable_gqa=True,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ what it means


def test_each_drafted_token_gets_what_decoding_its_path_gives() -> None:
    """The past and the path from the root, without the rest of the tree."""
    past, count = (50, 0, 300), len(PARENTS)
    made = packed((count,) * 3, tuple(n + count for n in past))
    output = attend(**made, attn_mask=tree().repeat(3, 1)).split(count)
    starts = made["cu_seq_k"].tolist()
    for b, length in enumerate(past):
        for token in range(count):
            kept = torch.tensor([*range(length), *(length + t for t in path_to(token))]) + starts[b]
            key, value = (made[name][kept].transpose(0, 1) for name in ("key", "value"))
            alone = dense(made["query"][b * count + token, :, None], key, value, enable_gqa=True)
            torch.testing.assert_close(output[b][token], alone.squeeze(1), rtol=1e-12, atol=1e-12)


def test_a_causal_mask_of_the_last_keys_is_is_causal() -> None:
    made = packed((9, 9), (70, 9))
    mask = torch.ones(9, 9, dtype=torch.bool).tril().repeat(2, 1)
    torch.testing.assert_close(attend(**made, attn_mask=mask), attend(**made, is_causal=True), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [dict(is_causal=True), dict(window=(20, 3)), dict(is_causal=True, window=(2, 0))])
def test_positions_and_mask_both_have_to_allow_a_key(options: dict[str, Any]) -> None:
    rows, keys = (9, 30), (70, 20)
    made = packed(rows, keys)
    mask = torch.rand(4, sum(rows), 25) < 0.6
    found = attend(**made, attn_mask=mask, **options)
    firsts = made["cu_seq_q"].tolist()
    split = [made["query"].split(rows), *(made[name].split(keys) for name in ("key", "value"))]
    for b, tensors in enumerate(zip(*split, strict=True)):
        row = slice(firsts[b], firsts[b + 1])
        alone = dense(
            *(t.transpose(0, 1) for t in tensors),
            dense_mask(mask, row, keys[b]),
            enable_gqa=True,
            causal_alignment="lower_right",
            **options,
        )
        assert torch.equal(found[row], alone.transpose(0, 1))


@pytest.mark.parametrize("kernel", [None, FEW_ROWS[0]])
@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_of_rows(dtype: torch.dtype, floating: bool, kernel: str | None) -> None:
    """From 1 to 100 drafted tokens: the bits of a dense call. Few rows take kernels of their own."""
    for rows in range(1, 101):
        made = packed((rows,), (rows + 140,), heads=8)
        query, key, value = (made[name].to(dtype) for name in ("query", "key", "value"))
        mask = torch.randn(rows, rows) if floating else torch.rand(rows, rows) < 0.5
        with forced(kernel):
            found = attend(**made | dict(query=query, key=key, value=value), attn_mask=mask)
            whole = dense_mask(mask, slice(None), rows + 140)
            wanted = dense(*(t.transpose(0, 1) for t in (query, key, value)), whole, enable_gqa=True)
        assert torch.equal(found.transpose(0, 1), wanted), rows


def test_columns_without_a_key_are_ignored() -> None:
    """They may hold anything, and their gradient is 0."""
    made = packed((4, 0, 3, 2), (3, 5, 20, 0))
    mask = torch.randn(9, 12, dtype=torch.float64)
    without = torch.zeros(9, 12, dtype=torch.bool)
    without[:4, :9] = without[7:] = True
    poisoned = mask.masked_fill(without, torch.nan).requires_grad_()
    found, wanted = (attend(**made, attn_mask=m) for m in (poisoned, mask))
    assert torch.equal(found, wanted)
    (gradient,) = torch.autograd.grad(found.square().sum(), poisoned)
    assert torch.equal(gradient != 0, ~without)


def test_nan_in_hidden_keys_reaches_no_row() -> None:
    made = packed((9, 9), (70, 9))
    mask = tree().repeat(2, 1)
    mask[:, 5] = False
    wanted = attend(**made, attn_mask=mask)
    for name in ("key", "value"):
        made[name] = made[name].index_fill(0, torch.tensor([66, 75]), torch.nan)
    assert torch.equal(attend(**made, attn_mask=mask), wanted)


def test_a_mask_may_have_any_strides_and_be_expanded() -> None:
    made = packed((9, 5), (70, 12))
    mask = torch.randn(14, 10)
    wanted = attend(**made, attn_mask=mask)
    for same in (mask.T.contiguous().T, mask[None], mask.expand(4, -1, -1), mask.repeat_interleave(2, 1)[:, ::2]):
        assert torch.equal(attend(**made, attn_mask=same), wanted)
    column = torch.randn(14, 1)
    assert torch.equal(attend(**made, attn_mask=column.expand(-1, 6)), attend(**made, attn_mask=column.repeat(1, 6)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_gradient_of_one_mask_for_all_heads_is_the_sum_of_those_of_heads(dtype: torch.dtype) -> None:
    made = packed((9, 150), (70, 140))
    shared = torch.randn(159, 60).to(dtype).requires_grad_()
    each = shared.detach().expand(4, -1, -1).clone().requires_grad_()
    gradients = [torch.autograd.grad(attend(**made, attn_mask=m).square().sum(), m)[0] for m in (shared, each)]
    assert [g.dtype for g in gradients] == [dtype] * 2
    error = torch.finfo(dtype).eps
    torch.testing.assert_close(gradients[0], gradients[1].sum(0), rtol=4 * error, atol=4 * error)


# ------------------------------------------------------------------------------------------------ caches


@pytest.mark.parametrize("page_size", [None, 7])
@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", LENGTHS)
def test_quantised_caches(name: str, cache: str, floating: bool, page_size: int | None) -> None:
    made = make(name, cache)
    rows = sum(made.rows)
    mask = torch.randn(4, rows, 33) if floating else torch.rand(rows, 33) < 0.7
    changes = {} if page_size is None else paged(made, page_size)
    check_rule(made, made.run(attn_mask=mask, is_causal=True, **changes), attn_mask=mask, is_causal=True)


def test_output_in_memory_of_the_caller() -> None:
    made = packed((9, 5), (70, 12))
    mask, buffer = torch.rand(14, 9) < 0.5, torch.empty(14, 4, 24, dtype=torch.float64)
    assert attend(**made, attn_mask=mask, out=buffer) is buffer
    assert torch.equal(buffer, attend(**made, attn_mask=mask))
    flat = torch.zeros(2000, dtype=torch.float64)
    overlapping = flat[: 14 * 9].view(14, 9), flat[: 14 * 4 * 24].view(14, 4, 24)
    with refused("out", "shares memory with attn_mask"):
        attend(**made, attn_mask=overlapping[0], out=overlapping[1])


def test_a_gradient_through_a_quantised_cache_is_refused() -> None:
    made = make("decode", "int8")
    mask = torch.zeros(4, 3, requires_grad=True)
    with refused("attn_mask", "requires grad", "no gradient"):
        made.run(attn_mask=mask)
    with torch.no_grad():
        made.run(attn_mask=mask)


# ------------------------------------------------------------------------------------------------ torch


@pytest.mark.parametrize("shape", [(7, 5), (1, 7, 5), (2, 7, 5)])
@pytest.mark.parametrize("batched", [(0, 0), (None, 0), (0, None)])
def test_vmap(batched: tuple[int | None, int | None], shape: tuple[int, ...]) -> None:
    """Each sample has its own gradient of the mask."""
    assert (sum(ROWS), max(KEYS)) == (7, 6)
    query, key, value = qkv()
    queries, masks = (torch.stack([torch.randn_like(t) for _ in range(SAMPLES)]) for t in (query, normal(*shape)))

    def gradients(query: Tensor, mask: Tensor) -> Any:
        def loss(query: Tensor, mask: Tensor) -> Any:
            output = attend(query, key, value, CU_Q, CU_K, 4, 6, attn_mask=mask)
            return output.square().sum(), output

        return torch.func.grad(loss, argnums=(0, 1), has_aux=True)(query, mask)

    arguments = [t if d == 0 else t[0] for t, d in zip((queries, masks), batched, strict=True)]
    with calls(varlen=1, varlen_backward=1):
        found = torch.vmap(gradients, in_dims=batched)(*arguments)
    wanted = [gradients(*(t if d is None else t[i] for t, d in zip(arguments, batched, strict=True))) for i in range(3)]
    for i, ((q, m), output) in enumerate(wanted):
        assert_bits((found[0][0][i], found[0][1][i], found[1][i]), (q, m, output))


def test_vmap_of_boolean_masks_and_their_errors() -> None:
    query, key, value = qkv()
    masks = torch.rand(SAMPLES, 7, 4) < 0.5

    def run(mask: Tensor) -> Any:
        return attend(query, key, value, CU_Q, CU_K, 4, 6, attn_mask=mask)

    assert_bits(torch.vmap(run)(masks), looped(run, (0,), masks))
    with refused("attn_mask", "(6, 4)", "7 query rows"):
        torch.vmap(run)(masks[:, 1:])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic: bool) -> None:
    torch._dynamo.reset()

    def function(query: Tensor, mask: Tensor, cu_seq: Tensor, longest: int) -> Any:
        return attend(query, query, query, cu_seq, cu_seq, longest, longest, attn_mask=mask)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for lengths, columns in (((3, 5, 9), 7), ((6, 2), 4), ((30, 1, 4), 11)):
        query, mask = torch.randn(sum(lengths), 2, 8), torch.randn(sum(lengths), columns)
        found = []
        for run in (function, compiled):
            leaves = [t.clone().requires_grad_() for t in (query, mask)]
            output = run(*leaves, cumulative(lengths), max(lengths))
            found.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)


def test_autocast_leaves_the_mask_as_it_is() -> None:
    made = packed((9, 5), (70, 12))
    cast = {name: made[name].bfloat16() for name in ("query", "key", "value")}
    mask = torch.full((14, 10), -1e38)  # in float16 this would be -inf
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(**made | {name: t.float() for name, t in cast.items()}, attn_mask=mask)
    assert torch.equal(found, attend(**made | cast, attn_mask=mask))


def test_explain_knows_the_gradient_of_the_mask() -> None:
    made = packed((9, 300), (70, 300))
    plain, wanted = (
        scaledot.explain_varlen(**made, attn_mask=torch.randn(309, 300).requires_grad_(grad)) for grad in (False, True)
    )
    assert plain.forward == wanted.forward
    assert plain.backward is not None
    assert wanted.backward is not None
    assert wanted.backward.workspace_bytes > plain.backward.workspace_bytes  # the sum over heads
    meta = {name: t.to("meta") if isinstance(t, Tensor) else t for name, t in made.items()}
    mask = torch.empty(309, 8, device="meta")
    assert scaledot.explain_varlen(**meta, attn_mask=mask).forward.kernels
    assert attend(**meta, attn_mask=mask).shape == (309, 4, 24)
    with refused("attn_mask", "(308, 8)", "309 query rows"):
        attend(**meta, attn_mask=mask[1:])


def test_the_backward_op_refuses_the_gradient_of_a_boolean_mask() -> None:
    made = packed((9, 5), (70, 12))
    del made["enable_gqa"]
    output, lse = torch.ops.scaledot.varlen(
        **dict.fromkeys(("seqused_k", "block_table", "alibi_slopes", "dropout_seed", "relative_bias", "k_scale")),
        **made, v_scale=None, attn_mask=None, enable_gqa=True,
    )  # fmt: skip
    rows = [made[n] for n in ("query", "key", "value", "cu_seq_q", "cu_seq_k")]
    mask = torch.ones(14, 3, dtype=torch.bool)
    options: list[Any] = [None, 9, 70, 0.0, False, None, True, "lower_right", None, None, None, None]
    with refused("output_mask", "grad_attn_mask", "floating attn_mask"):
        torch.ops.scaledot.varlen_backward(
            output, None, *rows, *[None] * 7, mask, output, lse, *options, [False] * 4 + [True]
        )
