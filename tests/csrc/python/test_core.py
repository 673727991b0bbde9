"""csrc/core through pybind11 (core.cpp), against definitions written out here. ctest runs this file."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import pytest
import scaledot_core as core
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

WORD = st.integers(0, 2**32 - 1)
SIDE = st.one_of(st.integers(0, 40), st.just(core.UNBOUNDED))
LENGTH = st.integers(1, 40)


@st.composite
def positions(draw: st.DrawFn) -> tuple[core.Positions, dict[str, int]]:
    named = {
        "query_length": draw(LENGTH),
        "key_length": draw(LENGTH),
        "diagonal": draw(st.integers(-40, 40)),
        "left": draw(SIDE),
        "right": draw(SIDE),
    }
    return core.Positions(**named), named


def may_attend(named: dict[str, int], i: int, j: int) -> bool:
    """Whether row i attends to key j: the definition in the docstring of scaled_dot_product_attention."""
    return -named["left"] <= j - (i + named["diagonal"]) <= named["right"]


@given(positions())
def test_attends(drawn: tuple[core.Positions, dict[str, int]]) -> None:
    compiled, named = drawn
    for i in range(named["query_length"]):
        for j in range(named["key_length"]):
            assert compiled.attends(i, j) == may_attend(named, i, j), (i, j)


@given(positions(), st.data())
def test_tiles(drawn: tuple[core.Positions, dict[str, int]], data: st.DataObject) -> None:
    """A tile that is skipped has no key to attend to, a full one only such keys; key_range leaves out none."""
    compiled, named = drawn
    first_row = data.draw(st.integers(0, named["query_length"] - 1))
    end_row = data.draw(st.integers(first_row + 1, named["query_length"]))
    first_key = data.draw(st.integers(0, named["key_length"] - 1))
    end_key = data.draw(st.integers(first_key + 1, named["key_length"]))
    rows = range(first_row, end_row)
    tile = [may_attend(named, i, j) for i in rows for j in range(first_key, end_key)]
    kind = compiled.tile_kind(first_row, end_row, first_key, end_key)
    if kind == "skip":
        assert not any(tile)
    elif kind == "full":
        assert all(tile)
    begin, end = compiled.key_range(first_row, end_row)
    for i in rows:
        for j in range(named["key_length"]):
            assert begin <= j < end or not may_attend(named, i, j), (i, j)


def philox(key: tuple[int, int], counter: tuple[int, int, int, int], rounds: int = 7) -> list[int]:
    """Philox4x32 as its authors define it (Salmon et al., SC 2011, section 4.3)."""
    key0, key1 = key
    left0, right0, left1, right1 = counter
    for _ in range(rounds):
        product0, product1 = 0xD2511F53 * left0, 0xCD9E8D57 * left1
        left0, right0 = (product1 >> 32) ^ right0 ^ key0, product1 % 2**32
        left1, right1 = (product0 >> 32) ^ right1 ^ key1, product0 % 2**32
        key0, key1 = (key0 + 0x9E3779B9) % 2**32, (key1 + 0xBB67AE85) % 2**32
    return [left0, right0, left1, right1]


@given(st.tuples(WORD, WORD), st.tuples(WORD, WORD, WORD, WORD))
def test_philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> None:
    assert list(core.philox(key, counter)) == philox(key, counter)


@given(
    st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2),
    st.integers(1, 8),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 3),
    st.integers(0, 5000),
    st.data(),
)
def test_dropout(
    seed: tuple[int, int], heads: int, dropout_p: float, batch: int, row: int, data: st.DataObject
) -> None:
    """Each weight's word, from the numbering that csrc/core/philox.h describes."""
    head = data.draw(st.integers(0, heads - 1))
    columns = data.draw(st.integers(1, 200))
    key = (seed[0] % 2**32, seed[0] % 2**64 >> 32)
    expected = []
    for column in range(columns):
        group, within = divmod(column, 64)
        word, lane = divmod(within, 16)
        counter = (group * 16 + lane, row, batch * heads + head, seed[1] % 2**32)
        expected.append(philox(key, counter)[word] >= int(dropout_p * 2**32))
    assert core.dropout_keeps_row(seed, heads, dropout_p, batch, head, row, columns) == expected


HALVES = pytest.mark.parametrize(
    ("widen", "narrow", "dtype"),
    [
        (core.widen_bfloat16, core.narrow_bfloat16, torch.bfloat16),
        (core.widen_float16, core.narrow_float16, torch.float16),
    ],
    ids=["bfloat16", "float16"],
)


@HALVES
def test_every_half_widens_as_in_torch(
    widen: Callable[[int], float], narrow: Callable[[float], int], dtype: torch.dtype
) -> None:
    bits = torch.arange(2**16, dtype=torch.int32)
    expected = bits.to(torch.uint16).view(dtype).float()
    actual = torch.tensor([widen(int(b)) for b in bits])
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    number = ~expected.isnan()
    assert [narrow(float(x)) for x in expected[number]] == bits[number].tolist()


@HALVES
@settings(max_examples=2000)
@given(bits=WORD)
def test_every_float_narrows_as_in_torch(
    widen: Callable[[int], float], narrow: Callable[[float], int], dtype: torch.dtype, bits: int
) -> None:
    x = struct.unpack("f", struct.pack("I", bits))[0]
    expected = torch.tensor(x).to(dtype)
    actual = narrow(x)
    if math.isnan(x):
        assert math.isnan(widen(actual))
    else:
        assert actual == int(expected.view(torch.uint16))
