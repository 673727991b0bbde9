"""Strategies of hypothesis for a Case: shapes, strides, masks and options that are right."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

from typing import Any

import hypothesis.strategies as st

from cases import DTYPES, Case
from layouts import LAYOUTS

Lengths = st.SearchStrategy[int]
LENGTHS: Lengths = st.one_of(
    st.integers(1, 20), st.integers(1, 140), st.sampled_from([31, 32, 33, 63, 64, 65, 127, 128, 129])
)
DIMS: Lengths = st.one_of(st.integers(1, 24), st.sampled_from([16, 32, 48, 64, 72, 96, 130]))
WINDOW_SIDE = st.one_of(st.none(), st.integers(0, 40))


@st.composite
def broadcast_sizes(draw: st.DrawFn, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Batch sizes of one tensor that broadcast to `batch`: some sizes become 1, some leading ones are dropped."""
    sizes = tuple(draw(st.sampled_from([size, size, 1])) for size in batch)
    first = draw(st.integers(0, len(sizes))) if draw(st.booleans()) else 0
    return sizes[first:]


@st.composite
def head_options(draw: st.DrawFn) -> dict[str, Any]:
    heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    how = draw(st.sampled_from(["equal", "gqa", "broadcast"]))
    if how == "gqa":
        return dict(
            heads=heads,
            kv_heads=draw(st.sampled_from([k for k in range(1, heads + 1) if heads % k == 0])),
            enable_gqa=True,
        )
    if how == "broadcast":
        return dict(
            heads=heads,
            kv_heads=draw(st.sampled_from([1, heads])),
            value_heads=draw(st.sampled_from([1, heads])),
        )
    return dict(heads=heads)


@st.composite
def mask_options(draw: st.DrawFn, dims: int) -> dict[str, Any]:
    mask = draw(st.sampled_from(["none", "bool", "float", "inf"]))
    if mask == "none":
        return {}
    shape = "".join(draw(st.sampled_from([letter, letter, "1"])) for letter in "HQK")
    shape = draw(st.sampled_from(["B", "1" * (dims - 3)])) + shape if draw(st.booleans()) else shape
    shape = shape[draw(st.integers(0, len(shape) - 1)) if draw(st.booleans()) else 0 :]
    options: dict[str, Any] = dict(mask=mask, mask_shape=shape, mask_layout=draw(st.sampled_from(LAYOUTS)))
    if mask == "bool" and draw(st.booleans()):
        options["masked_score"] = draw(st.sampled_from([-1e9, -4.0, 0.0]))
    if len(shape) > 1 and draw(st.booleans()):
        options["empty_rows"] = True
    return options


@st.composite
def cases(draw: st.DrawFn, lengths: Lengths = LENGTHS, dims: Lengths = DIMS) -> Case:
    """Any problem of torch.ops.scaledot.sdpa that is right."""
    batch = tuple(draw(st.lists(st.integers(1, 3), min_size=0, max_size=2)))
    options: dict[str, Any] = dict(
        batch=batch,
        query_batch=batch,
        key_batch=draw(broadcast_sizes(batch)),
        value_batch=draw(broadcast_sizes(batch)),
        query_length=draw(lengths),
        key_length=draw(lengths),
        head_dim=draw(dims),
        value_dim=draw(st.one_of(st.none(), dims)),
        dtype=draw(st.sampled_from(list(DTYPES))),
        causal=draw(st.booleans()),
        causal_alignment=draw(st.sampled_from(["upper_left", "lower_right"])),
        window=draw(st.one_of(st.none(), st.tuples(WINDOW_SIDE, WINDOW_SIDE))),
        alibi=draw(st.sampled_from(["none", "none", "H", "BH"])) if batch else "none",
        relative=draw(st.sampled_from(["none", "none", "1", "H", *(["B1", "BH"] if batch else [])])),
        relative_reach=draw(st.one_of(st.integers(0, 20), st.integers(0, 200))),
        scale=draw(st.one_of(st.none(), st.sampled_from([0.05, 0.5, -0.3]))),
        softcap=draw(st.one_of(st.none(), st.sampled_from([0.5, 20.0]))),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.2])),
        return_weights=draw(st.booleans()),
        layout=draw(st.sampled_from(LAYOUTS)),
        key_layout=draw(st.sampled_from(LAYOUTS)),
        value_layout=draw(st.sampled_from(LAYOUTS)),
        grad_layout=draw(st.sampled_from(LAYOUTS)),
    )
    options |= draw(head_options())
    options |= draw(mask_options(3 + len(batch)))
    return Case("drawn", **options)
