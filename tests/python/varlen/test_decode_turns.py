"""Decoding where the heads of a key are side by side in memory. They share tasks, and keep the bits of each alone."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import scaledot
from kernels_under_test import FEW_ROWS, forced
from quantised_cache import CACHES, stored
from varlen_cases import cumulative

GROUP, DIM, STRIDE = 2, 40, 2048  # query heads of a KV head; elements from a row to the next
KEYS = (2500, 4107)  # long enough for heads to share a task: at least 4 MB
DTYPES = {n: getattr(torch, n) for n in ("float32", "float64", "bfloat16", "float16")}
EVERY = [*CACHES, *DTYPES]
attend: Any = scaledot.varlen_attention


def spaced(rows: Tensor) -> Tensor:
    """A copy of (L, Hkv, D) or (pages, size, Hkv, D) in memory where rows are STRIDE elements apart."""
    memory = torch.zeros(*rows.shape[:-2], STRIDE, dtype=rows.dtype)
    copy = memory[..., : rows.size(-2) * DIM].unflatten(-1, rows.shape[-2:])
    copy.copy_(rows)
    return copy


def drawn(count: int, kv_heads: int, dtype: str, seed: int) -> Tensor:
    """(count, kv_heads, DIM), rows STRIDE elements apart."""
    generator, shape = torch.Generator().manual_seed(seed), (count, kv_heads, DIM)
    if dtype in CACHES:
        return spaced(stored(shape, CACHES[dtype], generator))
    return spaced(torch.randn(shape, generator=generator).to(DTYPES[dtype]))


def made(kv_heads: int, dtype: str) -> dict[str, Any]:
    """A decoding step of two sequences."""
    query = torch.randn(2, GROUP * kv_heads, DIM, generator=torch.Generator().manual_seed(3)) * 0.3
    arguments = dict(
        query=query.to(DTYPES.get(dtype, torch.bfloat16)),
        key=drawn(sum(KEYS), kv_heads, dtype, 1),
        value=drawn(sum(KEYS), kv_heads, dtype, 2),
        cu_seq_q=cumulative((1, 1)),
        cu_seq_k=cumulative(KEYS),
        max_q=1,
        max_k=max(KEYS),
        enable_gqa=True,
    )
    if dtype in CACHES:
        arguments["k_scale"] = torch.linspace(0.01, 0.02, kv_heads)
    return arguments


def each_alone(arguments: dict[str, Any], **options: Any) -> Tensor:
    """One call for each KV head."""
    outputs = []
    for head in range(arguments["key"].size(1)):
        one = dict(arguments)
        one["query"] = arguments["query"][:, head * GROUP : (head + 1) * GROUP]
        one["key"], one["value"] = (arguments[n][:, head : head + 1] for n in ("key", "value"))
        if "k_scale" in one:
            one["k_scale"] = arguments["k_scale"][head : head + 1]
        outputs.append(attend(**one, **options))
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("kernel", FEW_ROWS)
@pytest.mark.parametrize("dtype", EVERY)
def test_heads_have_the_bits_that_they_have_alone(dtype: str, kernel: str) -> None:
    arguments = made(6, dtype)
    with forced(kernel):
        assert torch.equal(attend(**arguments), each_alone(arguments))


@pytest.mark.parametrize("kv_heads", [2, 7, 9, 11, 16])
def test_numbers_of_heads(kv_heads: int) -> None:
    arguments = made(kv_heads, "int8")
    assert torch.equal(attend(**arguments), each_alone(arguments))


@pytest.mark.parametrize("count", [1, 2, 3, 16])
@pytest.mark.parametrize("dtype", ["e4m3", "bfloat16"])
def test_any_number_of_threads(dtype: str, count: int) -> None:
    """The number of threads decides how many heads share a task."""
    arguments, before = made(8, dtype), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted = attend(**arguments)
        torch.set_num_threads(count)
        assert torch.equal(attend(**arguments), wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "options", [dict(window=(700, 0)), dict(softcap=0.5), dict(is_causal=True, scale=0.1)], ids=str
)
def test_options(options: dict[str, Any]) -> None:
    arguments = made(6, "e5m2")
    assert torch.equal(attend(**arguments, **options), each_alone(arguments, **options))


@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("kernel", FEW_ROWS)
def test_nan_reaches_only_its_own_head(kernel: str, name: str) -> None:
    arguments = made(6, "e4m3")
    arguments[name].view(torch.uint8)[2000, 4, 39] = 0xFF
    with forced(kernel):
        output, alone = attend(**arguments), each_alone(arguments)
    assert torch.equal(output.nan_to_num(9.0), alone.nan_to_num(9.0))
    wrong = output.isnan().flatten(1).nonzero()
    heads = (wrong[:, 1] // DIM // GROUP).unique().tolist()
    assert heads == [4]
    assert wrong[:, 0].unique().tolist() == [0]


@pytest.mark.parametrize("size", [1, 16, 100])
@pytest.mark.parametrize("dtype", ["int8", "e4m3", "bfloat16"])
def test_pages(dtype: str, size: int) -> None:
    arguments = made(8, dtype)
    counts = [-(-n // size) for n in KEYS]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(size))
    table, first = torch.zeros(2, max(counts), dtype=torch.int32), 0
    pools = {n: spaced(torch.zeros(len(order), size, 8, DIM, dtype=arguments[n].dtype)) for n in ("key", "value")}
    for b, rows in enumerate(KEYS):
        for page in range(counts[b]):
            table[b, page] = order[page + sum(counts[:b])]
            for n, pool in pools.items():
                part = arguments[n][first + page * size : first + min((page + 1) * size, rows)]
                pool[table[b, page], : len(part)] = part
        first += rows
    paged = dict(arguments, **pools, cu_seq_k=None, seqused_k=torch.tensor(KEYS), block_table=table)
    assert torch.equal(attend(**paged), attend(**arguments))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kernel", FEW_ROWS)
def test_masks_that_exclude_tiles(kernel: str, own: bool) -> None:
    """With a mask of each head its own, heads see different tiles and take no turns."""
    heads, length = 6, 5000
    query = torch.randn(1, heads, 1, DIM)
    key, value = (spaced(torch.randn(1, length, heads, DIM)) for _ in range(2))
    mask = (torch.rand(1, heads if own else 1, 1, -(-length // 128)) < 0.5).repeat_interleave(128, -1)[..., :length]
    with forced(kernel):
        together = scaledot.scaled_dot_product_attention(query, key.transpose(1, 2), value.transpose(1, 2), mask)
        alone = [
            scaledot.scaled_dot_product_attention(
                query[:, h : h + 1], key[:, :, h : h + 1].transpose(1, 2), value[:, :, h : h + 1].transpose(1, 2),
                mask[:, h : h + 1] if own else mask,
            )
            for h in range(heads)
        ]  # fmt: skip
    assert torch.equal(together, torch.cat(alone, 1))
