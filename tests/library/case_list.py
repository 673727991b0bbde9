"""The named cases: every feature, every pair of features, sizes around the tile edges, shapes, memory layouts."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

from itertools import combinations, cycle, product
from typing import Any

from case_file import lines_of
from cases import DTYPES, Case
from layouts import LAYOUTS

LINES = lines_of("features")
FEATURES: dict[str, dict[str, Any]] = {name: options for name, options in LINES.items() if options}
MASK_SHAPES = (
    "BHQK",
    "1HQK",
    "B1QK",
    "11QK",
    "B11K",
    "BHQ1",
    "111K",
    "1HQ1",
    "HQK",
    "H1K",
    "1QK",
    "QK",
    "Q1",
    "1K",
    "K",
    "1",
)
LENGTHS = (1, 2, 3, 5, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200, 257)
HEAD_DIMS = (1, 3, 8, 20, 40, 64, 80, 96, 128, 192, 256, 512)


def _named(section: str) -> list[Case]:
    cases = []
    for name, line in lines_of(section).items():
        for dtype in DTYPES if line is not None else ():
            if line.get("dtype", dtype) == dtype:
                cases.append(Case(f"{name}-{dtype}", **{**line, "dtype": dtype}))
    return cases


def _pairs() -> list[Case]:
    """Every two features, each combination with the next dtype and the next ragged size.

    Only C++ has those that set one option to different values, where the later one wins.
    """
    cases = []
    dtypes, sizes = cycle(DTYPES), cycle([(37, 53), (66, 35), (19, 130), (5, 17), (49, 49)])
    for (first, a), (second, b) in combinations(list(LINES.items())[1:], 2):  # the first is plain
        dtype, (query_length, key_length) = next(dtypes), next(sizes)
        if a is None or b is None or any(a[option] != b[option] for option in a.keys() & b.keys()):
            continue
        size = dict(query_length=query_length, key_length=key_length)
        cases.append(Case(f"{first}+{second}-{dtype}", dtype=dtype, **{**size, **a, **b}))
    return cases


def _decode() -> list[Case]:
    """Decoding: few queries and enough keys that kernels split them; every option with every dtype."""
    cases = []
    sizes = cycle([(1, 700), (5, 140), (7, 1100), (2, 64)])
    for name, change in FEATURES.items():
        for dtype in DTYPES:
            query_length, key_length = next(sizes)
            options: dict[str, Any] = dict(
                query_length=query_length, key_length=key_length, causal_alignment="lower_right"
            )
            cases.append(Case(f"decode-{name}-{dtype}", dtype=dtype, **{**options, **change}))
    for length in LENGTHS:
        cases.append(Case(f"decode-{length}-float32", query_length=1, key_length=length, head_dim=64))
    # Many rows for decoding: at most 16, and at most 32 where a key has 512 bytes.
    others = cycle(dtype for dtype in DTYPES if dtype != "float32")
    sizes = cycle([(9, 700), (16, 140), (12, 1100), (11, 64)])
    for name, change in FEATURES.items():
        query_length, key_length = next(sizes)
        options = dict(query_length=query_length, key_length=key_length, head_dim=64, causal_alignment="lower_right")
        for dtype in ("float32", next(others)):
            cases.append(Case(f"decode-rows-{name}-{dtype}", dtype=dtype, **{**options, **change}))
    for query_length in (17, 24, 31, 32, 33):
        for dtype, head_dim in (("float32", 128), ("float64", 64), ("float16", 260)):
            options = dict(query_length=query_length, key_length=530, head_dim=head_dim, value_dim=40)
            cases.append(Case(f"decode-rows-{query_length}-{dtype}", dtype=dtype, dropout_p=0.2, **options))
    return cases


def _lengths() -> list[Case]:
    cases = []
    dtypes, head_dims = cycle(["float32", "bfloat16", "float32", "float16", "bfloat16"]), cycle([64, 32, 40])
    others, causal = cycle([129, 1, 64, 7, 33, 200, 16]), cycle([False, True, True])
    for length in LENGTHS:
        for query_length, key_length in ((length, length), (length, next(others)), (next(others), length)):
            dtype, is_causal = next(dtypes), next(causal)
            cases.append(
                Case(
                    f"length-{query_length}x{key_length}-{'causal-' if is_causal else ''}{dtype}",
                    batch=(1,),
                    query_length=query_length,
                    key_length=key_length,
                    head_dim=next(head_dims),
                    dtype=dtype,
                    causal=is_causal,
                    causal_alignment="lower_right" if key_length > query_length else "upper_left",
                )
            )
    return cases


def _head_dims() -> list[Case]:
    cases = []
    for head_dim in HEAD_DIMS:
        size: dict[str, Any] = dict(batch=(1,), query_length=18, key_length=35, head_dim=head_dim)
        cases += [Case(f"head_dim-{head_dim}-{dtype}", dtype=dtype, **size) for dtype in DTYPES]
    dtypes = cycle(DTYPES)
    for head_dim, value_dim in (
        (192, 128),
        (64, 1),
        (1, 64),
        (40, 256),
        (128, 20),
        (8, 65),
        (512, 3),
        (3, 512),
    ):
        dtype = next(dtypes)
        shape: dict[str, Any] = dict(batch=(1,), query_length=21, key_length=70, head_dim=head_dim, value_dim=value_dim)
        cases.append(Case(f"head_dim-{head_dim}x{value_dim}-{dtype}", dtype=dtype, return_weights=True, **shape))
    return cases


def _masks() -> list[Case]:
    cases = []
    dtypes = cycle(DTYPES)
    for shape, kind in product(MASK_SHAPES, ("bool", "float", "inf")):
        dtype = next(dtypes)
        cases.append(Case(f"mask_shape-{kind}-{shape}-{dtype}", mask=kind, mask_shape=shape, dtype=dtype))
    for layout, kind in product(LAYOUTS, ("bool", "float")):
        dtype = next(dtypes)
        cases.append(Case(f"mask_layout-{kind}-{layout}-{dtype}", mask=kind, mask_layout=layout, dtype=dtype))
    for dtype in ("bfloat16", "float16"):
        name = f"mask_dtype-float32-{dtype}"
        cases.append(Case(name, mask="float", mask_dtype="float32", mask_shape="HQK", dtype=dtype))
    return cases


def _layouts() -> list[Case]:
    cases = []
    dtypes, others = cycle(DTYPES), cycle(LAYOUTS[::-1])
    for layout in LAYOUTS:
        for _ in range(2):
            key_layout, value_layout, dtype = next(others), next(others), next(dtypes)
            cases.append(
                Case(
                    f"layout-{layout}-{key_layout}-{value_layout}-{dtype}",
                    layout=layout,
                    key_layout=key_layout,
                    value_layout=value_layout,
                    dtype=dtype,
                    return_weights=True,
                )
            )
    return cases


CASES: tuple[Case, ...] = (
    *_named("features"),
    *_pairs(),
    *_decode(),
    *_lengths(),
    *_head_dims(),
    *_masks(),
    *_layouts(),
    *_named("cases"),
)
BY_NAME: dict[str, Case] = {case.name: case for case in CASES}
if len(BY_NAME) != len(CASES):
    raise AssertionError("two cases have the same name")
