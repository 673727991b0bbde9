"""scaledot.row_invariant: a row has the same bits in every call that has it, whatever else the call has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import scaledot
from scaledot import explain, row_invariant, scaled_dot_product_attention, varlen_attention
from scaledot._load import OPS

HEADS, KV_HEADS, KEYS = 8, 2, 1300  # a group of 4 heads: 1 to 2 rows are few enough to decode, 33 are more than 128
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# The number of rows of each chunk of a prefill: single tokens, few rows, many rows.
CHUNKS = [[1] * 5 + [2, 3, 6, 9, 30, 44, 100, 1100], [700, 1, 1, 40, 558], [1300]]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": (600, 0)},
    {"softcap": 5.0},
    {"alibi_slopes": torch.linspace(0.1, 1.0, HEADS)},
]


def inputs(dtype: torch.dtype, head_dim: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(head_dim)
    query = torch.randn(1, HEADS, KEYS, head_dim).to(dtype)
    key = torch.randn(1, KV_HEADS, KEYS, head_dim).to(dtype)
    return query, key, torch.randn(1, KV_HEADS, KEYS, value_dim).to(dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    output, lse = scaled_dot_product_attention(
        query, key, value, is_causal=True, causal_alignment="lower_right", enable_gqa=True, return_lse=True, **options
    )
    return output, lse


def chunks_of(lengths: list[int]) -> list[range]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: next(iter(o), "plain"))
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (40, 24), (192, 128)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_of_a_prefill_have_its_bits(
    dtype: torch.dtype, head_dim: int, value_dim: int, options: dict[str, Any]
) -> None:
    query, key, value = inputs(dtype, head_dim, value_dim)
    with row_invariant():
        whole, whole_lse = attend(query, key, value, **options)
        for lengths in CHUNKS:
            for rows in chunks_of(lengths):
                at, end = slice(rows.start, rows.stop), rows.stop
                output, lse = attend(query[:, :, at], key[:, :, :end], value[:, :, :end], **options)
                assert torch.equal(output, whole[:, :, at]), (lengths, rows)
                assert torch.equal(lse, whole_lse[:, :, at]), (lengths, rows)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_weights_of_a_chunk_have_the_bits_of_the_prefill(dtype: torch.dtype) -> None:
    query, key, value = inputs(dtype, 64, 64)
    options: dict[str, Any] = {"is_causal": True, "causal_alignment": "lower_right", "enable_gqa": True}
    with row_invariant():
        whole = scaled_dot_product_attention(query, key, value, return_weights=True, **options)[1]
        for rows in chunks_of([1, 2, 30, 267, 1000]):
            at, end = slice(rows.start, rows.stop), rows.stop
            weights = scaled_dot_product_attention(
                query[:, :, at], key[:, :, :end], value[:, :, :end], return_weights=True, **options
            )[1]
            assert torch.equal(weights, whole[:, :, at, :end])


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_packed_and_paged_storage_have_the_bits_of_dense(dtype: torch.dtype) -> None:
    query, key, value = inputs(dtype, 64, 64)
    lengths, queries = [700, 33, 1300, 512], [1, 33, 7, 130]
    page = 64
    with row_invariant():
        dense = [
            attend(query[:, :, :rows], key[:, :, :keys], value[:, :, :keys])[0]
            for rows, keys in zip(queries, lengths, strict=True)
        ]
        flat = [torch.cat([t[0, :, :n].transpose(0, 1) for n in lengths]) for t in (key, value)]
        packed_query = torch.cat([query[0, :, :n].transpose(0, 1) for n in queries])
        cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (queries, lengths))
        options: dict[str, Any] = {"is_causal": True, "causal_alignment": "lower_right", "enable_gqa": True}
        packed = varlen_attention(packed_query, *flat, cu_q, cu_k, max(queries), max(lengths), **options)
        count = -(-max(lengths) // page)
        table = torch.randperm(4 * count).view(4, count).int()
        pools = [torch.zeros(4 * count, page, KV_HEADS, 64, dtype=dtype) for _ in range(2)]
        for pool, tensor in zip(pools, (key, value), strict=True):
            for sequence, n in enumerate(lengths):
                rows = torch.zeros(count * page, KV_HEADS, 64, dtype=dtype)
                rows[:n] = tensor[0, :, :n].transpose(0, 1)
                pool[table[sequence].long()] = rows.view(count, page, KV_HEADS, 64)
        used = torch.tensor(lengths).int()
        paged = varlen_attention(
            packed_query, *pools, cu_q, None, max(queries), max(lengths), block_table=table, seqused_k=used, **options
        )
    for result in (packed, paged):
        for sequence, rows in enumerate(chunks_of(queries)):
            assert torch.equal(result[rows.start : rows.stop].transpose(0, 1), dense[sequence][0]), sequence


def test_batch_entries_and_threads_do_not_matter() -> None:
    query, key, value = (t.expand(3, -1, -1, -1).contiguous() for t in inputs(torch.bfloat16, 64, 64))
    threads = torch.get_num_threads()
    with row_invariant():
        one = attend(query[:1, :, -2:], key[:1], value[:1])[0]
        try:
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                assert torch.equal(attend(query, key, value)[0][2:, :, -2:], one)
        finally:
            torch.set_num_threads(threads)


def test_it_is_a_setting_like_save_for_backward() -> None:
    query, key, value = inputs(torch.float32, 64, 64)
    few = query[:, :, :1]

    def takes_decode() -> bool:
        return "decode" in explain(few, key, value, enable_gqa=True).forward.kernel

    assert takes_decode()
    with row_invariant():
        assert not takes_decode()
        refused = explain(few, key, value, enable_gqa=True).forward.refused
        assert any("row_invariant is on" in refusal.reason for refusal in refused)
        with row_invariant(False):
            assert takes_decode()
        assert not takes_decode()
    assert takes_decode()
    with pytest.raises(TypeError, match="enabled: got"):
        row_invariant("yes")  # type: ignore[arg-type]
    assert OPS.row_invariant(False) is False
    assert "row_invariant" in scaledot.__all__
