"""Keys and values in pages: the same bits as for packed keys, for any page size and order of pages."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import scaledot
from cases import DTYPES
from kernels_under_test import FEW_ROWS, forced
from varlen_cases import FEATURES, Call, Packed, call, cumulative

PAGE_SIZES = (5, 16, 256)
# With few rows the pages are read in place; with many they are packed first. Lengths end at, before and after the end
# of a page.
LENGTHS = {"decode": ((1, 2, 1, 4), (300, 16, 257, 700)), "prefill": ((40, 9, 70, 33), (300, 16, 70, 255))}


def paged(made: Call, page_size: int, seed: int = 0, spare: int = 3) -> dict[str, Any]:
    """The keys and values of a call in a pool of shuffled pages. Unused rows are NaN. Page -1 follows the
    pages of a sequence."""
    lengths = made.packed.key_lengths
    counts = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(counts) + spare, generator=torch.Generator().manual_seed(seed))
    table = torch.full((len(lengths), max(counts) + 1), -1, dtype=torch.int32)
    pools = {}
    for name in ("key", "value"):
        tensor: Tensor = getattr(made, name).detach()
        pool = torch.full((len(order), page_size, *tensor.shape[1:]), torch.nan, dtype=tensor.dtype)
        first = 0
        for b, rows in enumerate(tensor.split(lengths)):
            for k, page in enumerate(rows.split(page_size)):
                pool[order[first + k], : len(page)] = page
                table[b, k] = order[first + k]
            first += counts[b]
        pools[name] = pool
    return dict(**pools, cu_seq_k=None, seqused_k=torch.tensor(lengths, dtype=torch.int32), block_table=table)


def assert_as_packed(made: Call, page_size: int, **changes: Any) -> None:
    wanted = made.run(**changes)
    found = made.run(**changes, **paged(made, page_size))
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", LENGTHS)
def test_pages_have_the_bits_of_packed_keys(name: str, page_size: int, dtype: str) -> None:
    common = dict(heads=4, kv_heads=2, enable_gqa=True, causal=True, value_dim=36, dtype=dtype)
    assert_as_packed(call(Packed(f"pages {name}", *LENGTHS[name], common), requires_grad=False), page_size)


@pytest.mark.parametrize("feature", [f for f in FEATURES if f != "plain"])
@pytest.mark.parametrize("name", LENGTHS)
def test_pages_have_the_bits_of_packed_keys_with_every_option(name: str, feature: str) -> None:
    assert_as_packed(call(Packed(f"pages {feature}", *LENGTHS[name], FEATURES[feature]), requires_grad=False), 16)


@pytest.mark.parametrize("name", LENGTHS)
def test_pages_have_the_bits_of_packed_keys_on_every_kernel(name: str, kernel: str) -> None:
    common = dict(heads=2, kv_heads=1, enable_gqa=True, dtype="bfloat16" if "bf16" in kernel else "float32")
    assert_as_packed(call(Packed(f"pages {kernel}", *LENGTHS[name], common), requires_grad=False), 16)


@pytest.mark.parametrize("kernel", FEW_ROWS, indirect=True)
def test_pages_have_the_bits_of_packed_keys_on_few_rows_kernels(kernel: str) -> None:
    rows, keys = LENGTHS["decode"]
    assert_as_packed(call(Packed(f"pages {kernel}", rows, keys, dict(head_dim=64)), requires_grad=False), 16)


def test_decoding_runs_a_few_rows_kernel() -> None:
    """Forcing such a kernel changes no bit of decoding."""
    made = call(Packed("pages chosen", *LENGTHS["decode"]), requires_grad=False)
    found = made.run(**paged(made, 16))
    with forced(FEW_ROWS[0]):
        assert torch.equal(made.run(**paged(made, 16))[0], found[0])


def test_same_bits_for_any_number_of_threads() -> None:
    made = call(Packed("pages threads", (1, 3, 60, 1), (2000, 90, 300, 1), dict(causal=True)), requires_grad=False)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(made.run(**paged(made, 16)))
    for results in found[1:]:
        assert torch.equal(results[0], found[0][0])
        assert torch.equal(results[1], found[0][1])


def test_the_order_of_pages_and_the_layout_of_the_pool_do_not_matter() -> None:
    made = call(Packed("pages order", *LENGTHS["decode"]), requires_grad=False)
    wanted = made.run(**paged(made, 16))
    for seed in (1, 2):
        arguments = paged(made, 16, seed)
        arguments["block_table"] = arguments["block_table"].long()
        # (pages, heads, page_size, columns) in memory, every second column.
        for name in ("key", "value"):
            wide = arguments[name].permute(0, 2, 1, 3).repeat_interleave(2, -1)[..., ::2]
            arguments[name] = wide.transpose(1, 2)
        found = made.run(**arguments)
        # The kernels for few rows refuse a last stride of 2, and others round differently.
        assert torch.allclose(found[0], wanted[0], atol=1e-6)
        contiguous = made.run(**arguments | {n: arguments[n].contiguous() for n in ("key", "value")})
        assert torch.equal(contiguous[0], wanted[0])


def test_decoding_step_by_step_gives_the_rows_of_a_causal_pass() -> None:
    """Compares a cache that grows by one token per step with one causal pass over all tokens."""
    length, page_size, heads, dim = 40, 16, 2, 32
    query, key, value = torch.randn(3, length, heads, dim, dtype=torch.float64).unbind()
    cu_seq = torch.tensor([0, length])
    wanted = scaledot.varlen_attention(query, key, value, cu_seq, cu_seq, length, length, window_size=(-1, 0))
    pool = torch.zeros(2, 7, page_size, heads, dim, dtype=torch.float64)
    table = torch.tensor([[4, 0, 6]], dtype=torch.int32)
    for step in range(length):
        page, row = int(table[0, step // page_size]), step % page_size
        pool[0, page, row], pool[1, page, row] = key[step], value[step]
        found = scaledot.varlen_attention(
            query[step : step + 1],
            pool[0],
            pool[1],
            torch.tensor([0, 1]),
            None,
            1,
            3 * page_size,
            seqused_k=torch.tensor([step + 1]),
            block_table=table,
            is_causal=True,
        )
        assert torch.allclose(found[0], wanted[step], atol=1e-12)


def test_sequences_without_keys_and_pools_without_pages() -> None:
    made = call(Packed("pages empty", (2, 3), (0, 20)), requires_grad=False)
    assert_as_packed(made, 16)
    empty = torch.zeros(0, 16, 2, 20)
    output, lse = made.run(
        key=empty,
        value=empty,
        cu_seq_k=None,
        seqused_k=torch.tensor([0, 0]),
        block_table=torch.zeros(2, 0, dtype=torch.int32),
    )
    assert not output.any()
    assert torch.isneginf(lse).all()


def test_sequences_may_share_a_page() -> None:
    """Two sequences share their first page."""
    pool = torch.randn(2, 3, 16, 2, 8)
    table, used = torch.tensor([[1, 0], [1, 2]]), torch.tensor([32, 20])
    query = torch.randn(2, 2, 8)
    found = scaledot.varlen_attention(
        query, pool[0], pool[1], cumulative((1, 1)), None, 1, 32, seqused_k=used, block_table=table
    )
    for b, n in enumerate(used.tolist()):
        key, value = (p[table[b]].flatten(0, 1)[:n].transpose(0, 1) for p in pool)
        wanted = scaledot.scaled_dot_product_attention(query[b : b + 1].transpose(0, 1), key, value)
        assert torch.equal(found[b : b + 1].transpose(0, 1), wanted)
