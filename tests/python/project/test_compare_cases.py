"""scaledot.compare: shapes, features and the cases made from them."""

from __future__ import annotations

import pytest

from command_line import only_case
from scaledot.compare.features import cases_of
from scaledot.compare.shapes import SETS, Shape, entries_of


@pytest.mark.parametrize("text", ["1x8x1024x64", "1x32:8x1:4096x128", "3x4x17x20:28", "1x1x5x64"])
def test_shape_notation_round_trips(text: str) -> None:
    assert str(Shape.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("1x8x64", "got '1x8x64'; needs BxHxLxD"),
        ("1x8x64x64x", "needs BxHxLxD"),
        ("1x8x0x64", "needs every size to be at least 1"),
        ("1x8:0x5x64", "needs every size to be at least 1"),
        ("1x8:3x5x64", "needs query heads that are a multiple of the 3 KV heads"),
    ],
)
def test_invalid_shapes(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Shape.parse(text)


@pytest.mark.parametrize("name", SETS)
def test_every_set_has_cases(name: str) -> None:
    cases, notes = cases_of(entries_of(name), None, ("float32",))
    assert cases
    assert not notes, "a set names a feature for a shape that it does not apply to"


def test_bars_cover_the_documented_shapes() -> None:
    cases, _ = cases_of(entries_of("bars"), None, ("float32",))
    found = {(c.feature_name, str(c.shape)) for c in cases}
    for feature in ("plain", "causal", "bool_mask", "padding", "mask_grad", "dropout", "weights"):
        for length in (512, 1024, 2048, 4096):
            assert {(feature, f"1x8x{length}x{dim}") for dim in (64, 128)} <= found
    assert {("mha_weights", f"1x8x{length}x64") for length in (512, 1024, 2048, 4096)} <= found
    assert ("mha_weights", "1x8x1024x128") in found
    for length in (512, 1024, 2048):
        assert {("plain", f"1x8x{length}x{dim}") for dim in (40, 80, 96, 192, 256)} <= found
        assert {("gqa", f"1x8:2x{length}x64"), ("gqa", f"1x32:1x{length}x128")} <= found
        assert {("value_dim", f"1x8x{length}x64:96"), ("blhd", f"1x8x{length}x128")} <= found
        assert ("padding", f"4x8x{length}x64") in found  # sequences of different lengths
    for keys in (4096, 16384, 65536):
        assert {("plain", f"1x32x1:{keys}x128"), ("gqa", f"1x32:8x1:{keys}x128")} <= found
    assert {("plain", "1x1x5x64"), *(("plain", f"64x8x{length}x64") for length in (16, 32, 64, 128))} <= found
    every, _ = cases_of(entries_of("bars"), None, ("float32", "bfloat16", "float16"))
    assert len(every) == 3 * len(cases)


def test_groups_separate_decode_and_tiny_cases() -> None:
    assert only_case("plain", "1x2x512x64").group == "plain"
    assert only_case("plain", "1x2x512x40").group == "other head widths"
    assert only_case("plain", "1x2x1:4096x64").group == "decode"
    assert only_case("gqa", "1x8x1:4096x64").group == "decode, GQA"
    assert only_case("causal", "1x1x5x64").group == "tiny, causal"


def test_flops() -> None:
    dense, causal = only_case("plain", "1x2x8x16"), only_case("causal", "1x2x8x16")
    assert dense.flops("forward") == 4 * 2 * 64 * 16
    assert dense.flops("backward") == 10 * 2 * 64 * 16
    assert causal.attended == 2 * 36
    assert only_case("window", "1x1x8x16").attended == 1 + 7 * 2  # itself and one before


def test_quantised_caches_have_no_float64() -> None:
    cases, notes = cases_of(entries_of("cache"), None, ("float64", "bfloat16"))
    assert {case.dtype_name for case in cases} == {"bfloat16"}
    assert notes[0] == "cache_int8 in float64: not run: quantised keys have no float64 queries"
