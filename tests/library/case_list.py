"""The named cases: every feature, every pair of features, sizes around the tile edges, shapes, memory layouts."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

from itertools import combinations, cycle, product
from typing import Any

from cases import DTYPES, Case
from layouts import LAYOUTS

# One option each. The names appear in the test ids.
FEATURES: dict[str, dict[str, Any]] = {
    "causal": dict(causal=True),
    "lower_right": dict(causal=True, causal_alignment="lower_right"),
    "window": dict(window=(9, 4)),
    "window_left": dict(window=(7, None), causal_alignment="lower_right"),
    "window_right": dict(window=(None, 3)),
    "softcap": dict(softcap=1.5),
    "alibi": dict(alibi="H"),
    "alibi_batch": dict(alibi="BH"),
    "relative": dict(relative="H"),
    "relative_batch": dict(relative="BH", relative_reach=150),
    "bool_mask": dict(mask="bool", empty_rows=True),
    "padding": dict(mask="bool", mask_shape="B11K"),
    "masked_score": dict(mask="bool", empty_rows=True, masked_score=-2.5),
    "masked_fill": dict(mask="bool", empty_rows=True, masked_score=-1e9),
    "float_mask": dict(mask="float"),
    "inf_mask": dict(mask="inf", empty_rows=True),
    "bias": dict(mask="float", mask_shape="1HQK"),
    "blocks": dict(blocks="BH"),
    "dropout": dict(dropout_p=0.3),
    "gqa": dict(heads=4, kv_heads=2, enable_gqa=True),
    "mqa": dict(heads=3, kv_heads=1, enable_gqa=True),
    "weights": dict(return_weights=True),
    "value_dim": dict(value_dim=28),
    "scale": dict(scale=0.7),
    "large": dict(values="large"),
    "blhd": dict(layout="blhd", grad_layout="blhd"),
}
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


def _features() -> list[Case]:
    cases = [Case(f"plain-{dtype}", dtype=dtype) for dtype in DTYPES]
    for name, change in FEATURES.items():
        cases += [Case(f"{name}-{dtype}", dtype=dtype, **change) for dtype in DTYPES]
    return cases


def _pairs() -> list[Case]:
    """Every two features that do not set the same option; each pair has the next dtype and the next ragged size."""
    cases = []
    dtypes, sizes = cycle(DTYPES), cycle([(37, 53), (66, 35), (19, 130), (11, 23), (49, 49)])
    for (first, a), (second, b) in combinations(FEATURES.items(), 2):
        if any(a[option] != b[option] for option in a.keys() & b.keys()):
            continue
        query_length, key_length = next(sizes)
        size = dict(query_length=query_length, key_length=key_length, dtype=next(dtypes))
        options: dict[str, Any] = size | a | b
        cases.append(Case(f"{first}+{second}-{options['dtype']}", **options))
    return cases


def _few_rows() -> list[Case]:
    """Decoding: few queries and enough keys that kernels split them; every option with every dtype."""
    cases = []
    sizes = cycle([(1, 700), (5, 140), (7, 1100), (2, 64)])
    for name, change in FEATURES.items():
        for dtype in DTYPES:
            query_length, key_length = next(sizes)
            options: dict[str, Any] = dict(
                query_length=query_length, key_length=key_length, causal_alignment="lower_right"
            )
            cases.append(Case(f"few_rows-{name}-{dtype}", dtype=dtype, **{**options, **change}))
    for length in LENGTHS:
        cases.append(Case(f"few_rows-{length}-float32", query_length=1, key_length=length, head_dim=64))
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
        cases.append(Case(f"mask-{kind}-{shape}-{dtype}", mask=kind, mask_shape=shape, dtype=dtype))
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
                    grad_layout=layout,
                    dtype=dtype,
                    return_weights=True,
                )
            )
    return cases


def _shapes() -> list[Case]:
    broadcast: dict[str, dict[str, Any]] = {
        "2d": dict(batch=(), heads=None, causal=True, return_weights=True),
        "2d_mask": dict(batch=(), heads=None, mask="float", mask_shape="QK"),
        "3d": dict(batch=(), heads=3, alibi="H", return_weights=True),
        "3d_mask": dict(batch=(), heads=3, mask="float", mask_shape="HQK"),
        "5d": dict(batch=(2, 3), heads=2, query_length=9, key_length=14, mask="float", return_weights=True),
        "6d": dict(batch=(2, 1, 2), heads=2, query_length=9, key_length=14, dropout_p=0.2),
        "one_key_batch": dict(batch=(3,), key_batch=(1,), value_batch=(1,)),
        "one_query_batch": dict(batch=(3,), query_batch=(1,), mask="float"),
        "crossed_batches": dict(batch=(2, 3), query_batch=(2, 1), key_batch=(1, 3), value_batch=(2, 3), dropout_p=0.2),
        "fewer_batch_dims": dict(batch=(2, 3), query_batch=(2, 3), key_batch=(3,), value_batch=(), alibi="H"),
        "mask_adds_no_batch": dict(batch=(2, 3), mask="bool", mask_shape="HQK", query_length=9, key_length=14),
        "one_kv_head": dict(heads=3, kv_heads=1),
        "one_query_head": dict(heads=3, query_heads=1, kv_heads=3, mask="float"),
        "one_key_head": dict(heads=3, kv_heads=1, value_heads=3),
        "gqa_broadcast": dict(heads=4, kv_heads=2, enable_gqa=True, batch=(2,), key_batch=(1,), value_batch=(1,)),
        "decode": dict(batch=(1,), query_length=1, key_length=257, head_dim=64),
        "decode_gqa": dict(heads=8, kv_heads=2, enable_gqa=True, query_length=1, key_length=300, head_dim=64),
        "decode_mask": dict(query_length=1, key_length=200, mask="bool", mask_shape="B11K", return_weights=True),
        "many_keys": dict(batch=(1,), heads=1, query_length=3, key_length=1100, head_dim=32),
        "many_queries": dict(batch=(1,), heads=1, query_length=700, key_length=5, head_dim=32),
        "one_key": dict(key_length=1, return_weights=True),
        "many_heads_causal": dict(
            batch=(1,), heads=8, kv_heads=1, enable_gqa=True, query_length=260, key_length=260, causal=True
        ),
        "many_heads_lse": dict(
            batch=(1,), heads=8, kv_heads=1, enable_gqa=True, query_length=200, key_length=260, grads=("lse",)
        ),
    }
    values: dict[str, dict[str, Any]] = {
        "negative": dict(batch=(1,), query_length=192, key_length=192, head_dim=64, values="negative"),
        "negative_causal": dict(batch=(1,), query_length=64, key_length=192, values="negative", causal=True),
        "negative_mask": dict(query_length=64, key_length=64, mask="float", mask_offset=-150.0, mask_shape="11QK"),
        "large_mask": dict(values="large", mask="inf", empty_rows=True, return_weights=True),
        "empty_causal_rows": dict(
            query_length=70, key_length=33, causal=True, causal_alignment="lower_right", mask="float"
        ),
        "empty_window_rows": dict(query_length=90, key_length=20, window=(2, 1), return_weights=True),
        "window_diagonal": dict(window=(0, 0), return_weights=True),
        "window_beyond": dict(window=(10**12, 10**12)),
        "window_wide": dict(query_length=130, key_length=150, window=(33, 65), causal_alignment="lower_right"),
        "window_lower_right": dict(query_length=70, key_length=33, window=(0, 0), causal_alignment="lower_right"),
        "blocks_shared": dict(blocks="11", block_size=(16, 64), query_length=130, key_length=150),
        "blocks_of_heads": dict(blocks="1H", block_size=(128, 128), query_length=200, key_length=260, causal=True),
        "blocks_of_batch": dict(
            blocks="B1", block_size=(33, 70), query_length=100, key_length=170, heads=4, kv_heads=1, enable_gqa=True
        ),
        "blocks_one": dict(blocks="BH", block_size=(1, 1), query_length=9, key_length=20, return_weights=True),
        "blocks_2d": dict(batch=(), heads=None, blocks="11", mask="float", mask_shape="QK"),
        "blocks_3d": dict(batch=(), heads=3, blocks="H", return_weights=True),
        "score_zero": dict(mask="bool", empty_rows=True, masked_score=0.0),
        "score_high": dict(mask="bool", mask_shape="B11K", masked_score=3.0, causal=True, return_weights=True),
        "dropout_high": dict(dropout_p=0.9, return_weights=True, query_length=70, key_length=140),
        "dropout_low": dict(dropout_p=0.01, return_weights=True, query_length=70, key_length=140),
        "softcap_small": dict(softcap=0.1, values="large"),
        "scale_negative": dict(scale=-0.4),
        "scale_zero": dict(scale=0.0, return_weights=True),
        "scale_underflow": dict(scale=1e-46, causal=True, return_weights=True),  # 0 in float32
        "scale_underflow_mask": dict(scale=1e-46, mask="bool", query_length=2, key_length=200),
        "scale_subnormal": dict(scale=1e-39, window=(3, 4), mask="bool", empty_rows=True),
        "only_lse_grad": dict(grads=("lse",)),
        "only_weights_grad": dict(grads=("weights",), return_weights=True, dropout_p=0.2),
        "only_output_grad": dict(grads=("output",), return_weights=True, mask="float"),
        "expanded_grad": dict(grad_layout="expanded_cols", mask="float", mask_shape="Q1"),
        "everything": dict(
            heads=4,
            kv_heads=2,
            enable_gqa=True,
            query_length=66,
            key_length=131,
            head_dim=40,
            value_dim=24,
            mask="inf",
            mask_shape="1HQK",
            causal=True,
            causal_alignment="lower_right",
            window=(90, None),
            softcap=3.0,
            alibi="BH",
            relative="B1",
            relative_reach=50,
            blocks="BH",
            block_size=(20, 50),
            dropout_p=0.2,
            scale=0.3,
            return_weights=True,
            layout="blhd",
        ),
    }
    cases = []
    for name, change in {**broadcast, **values}.items():
        cases += [Case(f"{name}-{dtype}", dtype=dtype, **change) for dtype in DTYPES]
    return cases


CASES: tuple[Case, ...] = (
    *_features(),
    *_pairs(),
    *_few_rows(),
    *_lengths(),
    *_head_dims(),
    *_masks(),
    *_layouts(),
    *_shapes(),
)
BY_NAME: dict[str, Case] = {case.name: case for case in CASES}
if len(BY_NAME) != len(CASES):
    raise AssertionError("two cases have the same name")
