"""scaledot.dropin.flash_attn against attention as it is defined, in float64, by flash-attn's own rule.

The rule: the error is at most twice that of the same formula in the inputs' dtype, plus a small absolute number.
"""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_reference import attention, check, rotated
from scaledot.dropin.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(7, 3)),
    "causal window": dict(causal=True, window_size=(9, 5)),
    "left only": dict(window_size=(4, -1)),
    "softcap": dict(softcap=3.0, causal=True),
    "alibi": dict(alibi_slopes=torch.tensor([[0.3, 0.1, 0.02, 0.5], [0.05, 0.2, 0.4, 0.01]])),
    "scale": dict(softmax_scale=0.3),
}
LENGTHS = [(17, 17), (33, 70), (40, 12), (1, 61)]


def qkv(lengths: tuple[int, int], kv_heads: int = 2, dtype: torch.dtype = torch.float32, dim: int = 40) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, lengths[0], 4, dim), *[(2, lengths[1], kv_heads, dim)] * 2]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def check_gradients(found: Callable[..., Tensor], leaves: list[Tensor], **options: Any) -> None:
    """Output and gradients of `found(*leaves)`, where the leaves are q, k and v of flash_attn_func."""
    cotangent = torch.randn_like(attention(*leaves, **options)[0])

    def solve(function: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
        output = function(*inputs)
        return [output, *torch.autograd.grad(output, inputs, cotangent.to(output.dtype))]

    doubles = [x.detach().double().requires_grad_() for x in leaves]
    exact = solve(lambda *x: attention(*x, **options)[0], doubles)
    eager = solve(lambda *x: attention(*x, **options)[0], leaves)
    for ours, wanted, yardstick in zip(solve(found, leaves), exact, eager, strict=True):
        check(ours, wanted, yardstick)


# ------------------------------------------------------------------------------------------------------ dense
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", OPTIONS)
def test_dense(name: str, lengths: tuple[int, int], dtype: torch.dtype) -> None:
    leaves = qkv(lengths, dtype=dtype)
    check_gradients(lambda *x: flash_attn_func(*x, **OPTIONS[name]), leaves, **OPTIONS[name])
    _, lse, weights = flash_attn_func(*leaves, **OPTIONS[name], return_attn_probs=True)
    wanted = attention(*(x.double() for x in leaves), **OPTIONS[name])[1]
    assert (lse.shape, lse.dtype, weights.shape) == ((2, 4, lengths[0]), torch.float32, (0,))
    torch.testing.assert_close(lse, wanted.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_heads_and_packed_forms_have_the_same_bits(kv_heads: int) -> None:
    q, k, v = qkv((30, 30), kv_heads)
    wanted = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=True), wanted)
    if kv_heads == 4:
        assert torch.equal(flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), causal=True), wanted)
    check_gradients(lambda *x: flash_attn_func(*x, causal=True), [q, k, v], causal=True)


def test_dropout_returns_the_weights_that_multiplied_the_values() -> None:
    q, k, v = qkv((30, 50), 4)
    out, _, weights = flash_attn_func(q, k, v, 0.4, causal=True, return_attn_probs=True)
    assert weights.shape == (2, 4, 30, 50)
    torch.testing.assert_close((weights @ v.transpose(1, 2)).transpose(1, 2), out)
    exact = attention(q, k, v, causal=True)[2]
    kept = weights != 0
    torch.testing.assert_close(weights[kept], (exact / 0.6)[kept])
    assert 0.35 < 1 - kept.sum() / (exact != 0).sum() < 0.45


# ----------------------------------------------------------------------------------------------------- varlen
ENDS_Q, ENDS_K = torch.tensor([0, 9, 9, 40], dtype=torch.int32), torch.tensor([0, 30, 35, 50], dtype=torch.int32)


def packed(dtype: torch.dtype = torch.float32, dim: int = 24) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(n, h, dim).to(dtype).requires_grad_() for n, h in ((40, 4), (50, 2), (50, 2))]


def each(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of each sequence alone."""
    ends = zip(ENDS_Q[:-1], ENDS_Q[1:], ENDS_K[:-1], ENDS_K[1:], strict=True)
    return torch.cat([function(q[a:b][None], k[c:d][None], v[c:d][None])[0] for a, b, c, d in ends])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "alibi"])
def test_varlen(name: str, dtype: torch.dtype) -> None:
    def ours(*x: Tensor) -> Any:
        return flash_attn_varlen_func(*x, ENDS_Q, ENDS_K, 31, 30, **OPTIONS[name])

    def wanted(*x: Tensor) -> Tensor:
        return each(lambda *y: attention(*y, **OPTIONS[name])[0], *x)

    leaves = packed(dtype)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    cotangent = torch.randn(40, 4, 24)
    results = []
    for function, inputs in ((ours, leaves), (wanted, doubles), (wanted, leaves)):
        output = function(*inputs)
        results.append([output, *torch.autograd.grad(output, inputs, cotangent.to(output.dtype))])
    for found, exact, eager in zip(*results, strict=True):
        check(found, exact, eager)


def test_varlen_packed_forms_alibi_and_lse() -> None:
    q, k, v = packed()
    slopes = torch.rand(3, 4)
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, ENDS_Q, ENDS_K, 31, 30, alibi_slopes=slopes, return_attn_probs=True, causal=True
    )
    kv = torch.stack([k, v], 1)
    assert torch.equal(
        flash_attn_varlen_kvpacked_func(q, kv, ENDS_Q, ENDS_K, 31, 30, alibi_slopes=slopes, causal=True), out
    )
    assert lse.shape == (4, 40)
    for b in (0, 2):
        rows, keys = slice(*ENDS_Q[b : b + 2].tolist()), slice(*ENDS_K[b : b + 2].tolist())
        wanted = attention(q[rows][None], k[keys][None], v[keys][None], causal=True, alibi_slopes=slopes[b])
        torch.testing.assert_close(out[rows], wanted[0][0])
        torch.testing.assert_close(lse[:, rows], wanted[1][0])
    qkv_packed = torch.randn(40, 3, 4, 24)
    torch.testing.assert_close(
        flash_attn_varlen_qkvpacked_func(qkv_packed, ENDS_Q, 31),
        flash_attn_varlen_func(*qkv_packed.unbind(1), ENDS_Q, ENDS_Q, 31, 31),
        rtol=0,
        atol=0,
    )


def test_varlen_dropout_returns_the_weights_that_multiplied_the_values() -> None:
    q, k, v = packed()
    out, lse, weights = flash_attn_varlen_func(q, k, v, ENDS_Q, ENDS_K, 31, 30, 0.3, return_attn_probs=True)
    assert (lse.shape, weights.shape) == ((4, 40), (3, 4, 31, 30))
    values = F.pad(v[35:50].repeat_interleave(2, 1), (0, 0, 0, 0, 0, 15)).transpose(0, 1)  # of the last sequence
    torch.testing.assert_close((weights[2] @ values).transpose(0, 1), out[9:])
    assert not weights[1].any()


def test_varlen_pages() -> None:
    q, k, v = (x.detach() for x in packed())
    table, lengths = torch.tensor([[3, 0], [5, -1], [1, 4]], dtype=torch.int32), ENDS_K.diff()
    pages = torch.full((2, 6, 16, 2, 24), math.nan)
    for b in range(3):
        for j in range(int(lengths[b])):
            pages[0, table[b, j // 16], j % 16] = k[ENDS_K[b] + j]
            pages[1, table[b, j // 16], j % 16] = v[ENDS_K[b] + j]
    found = flash_attn_varlen_func(q, *pages, ENDS_Q, ENDS_K, 31, 30, causal=True, block_table=table)
    assert torch.equal(found, flash_attn_varlen_func(q, k, v, ENDS_Q, ENDS_K, 31, 30, causal=True))
    with pytest.raises(ValueError, match="return_attn_probs: got True with dropout_p > 0 and a block_table"):
        flash_attn_varlen_func(q, *pages, ENDS_Q, ENDS_K, 31, 30, 0.5, return_attn_probs=True, block_table=table)


# ---------------------------------------------------------------------------------------------------- kvcache
CAPACITY = 48
CACHES = ["plain", "batch index", "left padding", "pages"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, dict(causal=True), dict(window_size=(11, 2))], ids=["plain", "causal", "local"]
)
@pytest.mark.parametrize(
    ("new", "rotary"),
    [(0, None), *((new, rotary) for new in (1, 5) for rotary in (None, True, False))],
    ids=lambda value: (
        {None: "no rotary", True: "interleaved", False: "halves"}[value]
        if value is None or isinstance(value, bool)
        else str(value)
    ),
)
@pytest.mark.parametrize("kind", CACHES)
def test_kvcache(kind: str, rotary: bool | None, new: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = torch.tensor([4, 0, 2], dtype=torch.int32) if kind == "batch index" else torch.arange(3)
    caches = torch.randn(2, 5 if kind == "batch index" else 3, CAPACITY, 2, 32).to(dtype)
    used = torch.tensor([7, 30, 41], dtype=torch.int32)
    left = torch.tensor([3, 0, 9], dtype=torch.int32) if kind == "left padding" else None
    q, (k, v) = torch.randn(3, 5, 4, 32).to(dtype), torch.randn(2, 3, max(new, 1), 2, 32).to(dtype)
    angles = torch.rand(CAPACITY + 3, 8) * 6
    tables = (angles.cos().to(dtype), angles.sin().to(dtype)) if rotary is not None else (None, None)

    wanted_k, wanted_v, turned = *caches.clone(), q
    if new:
        positions = used[:, None] + torch.arange(new)
        places = used[:, None] + torch.arange(5) * bool(options)
        new_k = k if rotary is None else rotated(k, *tables, positions, rotary)
        turned = q if rotary is None else rotated(q, *tables, places, rotary)
        for b in range(3):
            wanted_k[rows[b], used[b] : used[b] + new] = new_k[b]
            wanted_v[rows[b], used[b] : used[b] + new] = v[b]
    given, placed = caches, {}
    if kind == "pages":
        table = torch.randperm(9).view(3, 3).int()
        given = torch.full((2, 9, 16, 2, 32), math.nan, dtype=dtype)
        given[:, table.long()] = caches.unflatten(2, (3, 16))
        placed = dict(block_table=table)
    elif kind == "batch index":
        placed = dict(cache_batch_idx=rows)
    elif left is not None:
        placed = dict(cache_leftpad=left)
    out, lse = flash_attn_with_kvcache(
        q, *given, *((k, v) if new else ()), rotary_cos=tables[0], rotary_sin=tables[1], cache_seqlens=used,
        rotary_interleaved=rotary is not False, return_softmax_lse=True, num_splits=3, **placed, **options,
    )  # fmt: skip
    if kind == "pages":
        given = given[:, placed["block_table"].long()].flatten(2, 3)
    assert torch.equal(given[1], wanted_v)
    torch.testing.assert_close(given[0], wanted_k)
    for b in range(3):
        keys = slice(0 if left is None else left[b], used[b] + new)
        one = [turned[b : b + 1], wanted_k[rows[b], keys][None], wanted_v[rows[b], keys][None]]
        exact, exact_lse, _ = attention(*(x.double() for x in one), **options)
        check(out[b : b + 1], exact, attention(*one, **options)[0])
        torch.testing.assert_close(lse[b : b + 1], exact_lse.float(), rtol=1e-4, atol=1e-4)


def test_kvcache_lengths_as_a_number() -> None:
    q, cache = torch.randn(2, 1, 2, 16), torch.randn(2, 12, 2, 16)
    exact = attention(q, cache[:, :5], cache[:, :5])[0]
    torch.testing.assert_close(flash_attn_with_kvcache(q, cache, cache, cache_seqlens=5), exact)
    torch.testing.assert_close(flash_attn_with_kvcache(q, cache, cache), attention(q, cache, cache)[0])


# ----------------------------------------------------------------------------------------- gradcheck, compile
def test_gradcheck() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 3, dtype=torch.float64).requires_grad_() for n in (3, 4, 4))
    ends = torch.tensor([0, 1, 3]), torch.tensor([0, 2, 4])
    stacked = torch.randn(1, 3, 3, 2, 3, dtype=torch.float64).requires_grad_()
    kv = torch.stack([k, v], 2).detach().requires_grad_()
    causal = dict(causal=True, softcap=2.0)
    for function, inputs in (
        (lambda *x: flash_attn_func(*x, **causal), (q, k, v)),
        (lambda *x: flash_attn_kvpacked_func(*x, **causal), (q, kv)),
        (lambda *x: flash_attn_qkvpacked_func(*x, **causal), (stacked,)),
        (lambda *x: flash_attn_varlen_func(*(y[0] for y in x), *ends, 2, 2, **causal), (q, k, v)),
        (lambda *x: flash_attn_varlen_kvpacked_func(*(y[0] for y in x), *ends, 2, 2, **causal), (q, kv)),
        (lambda x: flash_attn_varlen_qkvpacked_func(x[0], ends[0], 2, **causal), (stacked,)),
    ):
        assert torch.autograd.gradcheck(function, inputs)


def test_compiles_to_one_graph() -> None:
    q, k, v = (x.detach() for x in qkv((20, 20)))
    flat = [x[0] for x in (q, k, v)]
    ends = torch.tensor([0, 5, 20], dtype=torch.int32)
    cache = torch.randn(2, 2, 30, 2, 40)

    def run(q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> list[Tensor]:
        return [
            flash_attn_func(q, k, v, causal=True),
            flash_attn_varlen_func(*flat, ends, ends, 15, 15, causal=True),
            flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=7, causal=True),
        ]

    eager_cache, compiled_cache = cache.clone(), cache.clone()
    wanted = run(q, k, v, eager_cache)
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v, compiled_cache)
    assert all(map(torch.equal, found, wanted))
    assert torch.equal(eager_cache, compiled_cache)


def test_compiles_once_for_all_lengths() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, cache: Tensor, used: Tensor) -> list[Tensor]:
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        return [
            flash_attn_func(q, k, v, causal=True),
            flash_attn_varlen_func(*flat, ends, ends, 200, 200, causal=True),
            flash_attn_with_kvcache(q, *cache, cache_seqlens=used, causal=True),
        ]

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    cache, used = torch.randn(2, 3, 90, 2, 40), torch.tensor([70, 90, 66], dtype=torch.int32)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (20, 33, 57):
            torch.manual_seed(length)
            q = torch.randn(3, length, 4, 40)
            k, v = torch.randn(2, 3, length, 2, 40).clone().unbind()
            ends = torch.tensor([0, 7, 3 * length], dtype=torch.int32)
            assert all(map(torch.equal, compiled(q, k, v, ends, cache, used), run(q, k, v, ends, cache, used)))


def test_vmap() -> None:
    torch.manual_seed(0)
    queries = torch.randn(3, 2, 9, 4, 8)
    k, v = torch.randn(2, 2, 12, 2, 8).unbind()
    ends, key_ends = torch.tensor([0, 5, 9], dtype=torch.int32), torch.tensor([0, 4, 12], dtype=torch.int32)

    def padded(q: Tensor) -> Any:
        return flash_attn_func(q, k, v, causal=True, window_size=(4, 0))

    def packed(q: Tensor) -> Any:
        return flash_attn_varlen_func(q[0], k[0], v[0], ends, key_ends, 5, 8, causal=True)

    for function in (padded, packed):
        assert torch.equal(torch.vmap(function)(queries), torch.stack([function(q) for q in queries]))
        gradients = torch.func.grad(lambda q, function=function: function(q).square().sum())
        wanted = torch.stack([gradients(q) for q in queries])
        torch.testing.assert_close(torch.vmap(gradients)(queries), wanted)
