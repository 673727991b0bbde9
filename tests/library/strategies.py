"""Strategies of hypothesis for calls of the Python functions: every argument, right and wrong.

A call is kept as source text, so that the smallest one that fails can be printed as a program and kept in a corpus.
"""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st

import strategies_flash_attn as flash_attn
from call_sources import SMALL, SPOILT, STRANGE, STRANGE_TENSORS, WIDTHS, Call, ends, options, tensor
from case_strategies import WINDOW_SIDE, cases
from cases import DTYPES, Case
from layouts import LAYOUTS
from strategies_score_mod import HOSTILE, score_mods

SDPA, VARLEN, MODULE = (
    "scaledot.scaled_dot_product_attention",
    "scaledot.varlen_attention",
    "scaledot.MultiHeadAttention",
)
# Dtypes of quantised keys and values, and a factor of their scales.
CACHES = {"float8_e4m3fn": 0.5, "float8_e5m2": 0.5, "int8": 0.04}


def stored(shape: tuple[int, ...], dtype: str) -> str:
    """An expression for quantised numbers of this shape."""
    if dtype == "int8":
        return f"torch.randint(-127, 128, {shape}, dtype=torch.int8)"
    return f"(torch.randn({shape}) * 4).to(torch.{dtype})"


@st.composite
def biases(draw: st.DrawFn, leading: list[tuple[int, ...]], dtype: str) -> str:
    """An expression for a relative_bias that has one of these leading sizes."""
    shape = (*draw(st.sampled_from(leading)), 2 * draw(st.integers(0, 12)) + 1)
    return f"torch.randn({shape}, dtype=torch.{dtype})"


def _mask(case: Case) -> str:
    shape, dtype = case.attn_mask_shape, f"dtype=torch.{case.dtype}"
    attends, values = f"(torch.rand({shape}) < 0.7)", f"torch.randn({shape}, {dtype})"
    return {"bool": attends, "float": values, "inf": f"torch.where({attends}, {values}, -math.inf)"}[case.mask]


DEFAULTS: dict[str, Any] = {
    "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False, "causal_alignment": "upper_left",
    "window": None, "softcap": None, "masked_score": -math.inf, "return_weights": False, "return_lse": False,
}  # fmt: skip


@st.composite
def sdpa_calls(draw: st.DrawFn) -> Call:
    case = draw(cases(SMALL, WIDTHS))
    sources = {
        name: tensor(shape, case.dtype, layout or case.layout)
        for name, shape, layout in (
            ("query", case.query_shape, None),
            ("key", case.key_shape, case.key_layout),
            ("value", case.value_shape, case.value_layout),
        )
    }
    if case.mask != "none":
        sources["attn_mask"] = _mask(case)
    if case.alibi != "none":
        shape = (case.heads,) if case.alibi == "H" else (*case.batch, case.heads)
        sources["alibi_slopes"] = f"torch.rand({shape})"
    if case.relative != "none":
        sources["relative_bias"] = f"torch.randn({case.relative_shape}, dtype=torch.{case.dtype})"
    rows, keys = case.query_shape[-2], case.key_shape[-2]
    if rows and keys and draw(st.integers(0, 5)) == 5:
        shape = (rows, keys) if draw(st.booleans()) else (case.heads, rows, keys)
        size = draw(st.sampled_from(["1", "(2, 3)", "4", "(8, 5)", "16", "128"]))
        sources["block_mask"] = f"scaledot.BlockMask.from_dense(torch.rand({shape}) < 0.6, block_size={size})"
    given = case.functional_arguments() | {"return_lse": draw(st.booleans())}
    if draw(st.integers(0, 3)) == 3:
        for name in ("softcap", "alibi_slopes", "relative_bias"):  # a function has them in itself
            sources.pop(name, None)
            given.pop(name, None)
        batches = math.prod(case.output_shape[:-3])
        sources["score_mod"] = draw(score_mods(batches, case.heads or 1, rows, keys, case.dtype))
    sources |= draw(options(given, DEFAULTS))
    return Call(SDPA, tuple(sources.items()), draw(st.integers(0, 9)), draw(st.integers(0, 7)) == 7)


@st.composite
def varlen_calls(draw: st.DrawFn) -> Call:
    lengths = draw(st.lists(st.tuples(SMALL, SMALL), min_size=0, max_size=4))
    rows, keys = [one[0] for one in lengths], [one[1] for one in lengths]
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    width, value_width = draw(WIDTHS), draw(WIDTHS)
    dtype, layouts = draw(st.sampled_from(list(DTYPES))), [draw(st.sampled_from(LAYOUTS)) for _ in range(3)]
    sources = {"query": tensor((sum(rows), kv_heads * group, width), dtype, layouts[0])}
    paged = draw(st.booleans())
    index = draw(st.sampled_from(["torch.int32", "torch.int64"]))
    sources["cu_seq_q"] = ends(rows, index)
    longest = max(keys, default=0)
    if paged:
        size = draw(st.integers(1, 9))
        columns = -(-longest // size)
        pages = draw(st.integers(max(columns, 1), columns + 3))
        shape = (pages, size, kv_heads)
        table = [[(3 * b + 5 * k) % pages for k in range(columns)] for b in range(len(lengths))]
        sources["cu_seq_k"] = "None"
        sources["seqused_k"] = f"torch.tensor({keys}, dtype={index})"
        sources["block_table"] = f"torch.tensor({table}, dtype={index}).reshape({(len(lengths), columns)})"
    else:
        shape = (sum(keys), kv_heads)
        sources["cu_seq_k"] = ends(keys, index)
        if draw(st.integers(0, 3)) == 3:
            sources["seqused_k"] = f"torch.tensor({[number // 2 for number in keys]}, dtype={index})"
    cache = draw(st.sampled_from([None, None, None, *CACHES])) if dtype != "float64" else None
    if cache:
        sources["key"], sources["value"] = stored((*shape, width), cache), stored((*shape, value_width), cache)
        for name in ("k_scale", "v_scale"):
            if draw(st.integers(0, 3)) < 3:
                sizes = draw(st.sampled_from([(), (kv_heads,), (len(lengths), kv_heads)]))
                sources[name] = f"torch.rand({sizes}) * {CACHES[cache]}"
    else:
        sources["key"] = tensor((*shape, width), dtype, layouts[1])
        sources["value"] = tensor((*shape, value_width), dtype, layouts[2])
    given = {"max_q": max(rows, default=0) + draw(st.sampled_from([0, 0, 5])), "max_k": longest}
    given |= {
        "is_causal": draw(st.booleans()), "causal_alignment": draw(st.sampled_from(["upper_left", "lower_right"])),
        "window": draw(st.one_of(st.none(), st.tuples(WINDOW_SIDE, WINDOW_SIDE))),
        "softcap": draw(st.sampled_from([None, 0.5, 20.0])), "scale": draw(st.sampled_from([None, 0.5, -0.3])),
        "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.25])), "num_splits": draw(st.sampled_from([None, 1, 3])),
        "return_lse": draw(st.booleans()), "enable_gqa": group > 1,
    }  # fmt: skip
    if draw(st.integers(0, 3)) == 3:
        sources["alibi_slopes"] = f"torch.rand({kv_heads * group})"
    if draw(st.integers(0, 3)) == 3:
        sources["relative_bias"] = draw(biases([(kv_heads * group,), (len(lengths), kv_heads * group), (1,)], dtype))
    if draw(st.integers(0, 3)) == 3:
        leading: list[tuple[int, ...]] = [(), (1,), (kv_heads * group,)]
        shape = (*draw(st.sampled_from(leading)), sum(rows), draw(st.integers(1, 12)))
        masks = [f"(torch.rand({shape}) < 0.7)", f"torch.randn({shape}, dtype=torch.{dtype})"]
        sources["attn_mask"] = draw(st.sampled_from(masks))
    sources |= draw(options(given, DEFAULTS | {"causal_alignment": "lower_right"}))
    second = not paged and not cache and draw(st.integers(0, 6)) == 6
    return Call(VARLEN, tuple(sources.items()), draw(st.integers(0, 9)), second)


@st.composite
def module_calls(draw: st.DrawFn) -> Call:
    kv_heads, group, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    heads = kv_heads * group
    embed, kdim, vdim = (draw(st.integers(1, 12)) for _ in range(3))
    dtype = draw(st.sampled_from(list(DTYPES)))
    built = {
        "embed_dim": embed, "num_heads": heads, "num_kv_heads": kv_heads, "kdim": kdim, "vdim": vdim,
        "qk_dim": heads * width, "v_dim": heads * draw(st.integers(1, 6)), "bias": draw(st.booleans()),
        "out_proj": draw(st.booleans()), "dropout": draw(st.sampled_from([0.0, 0.25])),
    }  # fmt: skip
    constructor = draw(options(built, {"bias": True, "out_proj": True, "dropout": 0.0}))
    if dtype != "float32" or draw(st.booleans()):
        constructor["dtype"] = f"torch.{dtype}"
    function = f"{MODULE}({', '.join(f'{name}={source}' for name, source in constructor.items())})"
    batch = draw(st.sampled_from([(), (0,), (1,), (2,), (3,)]))
    rows, keys = draw(SMALL), draw(SMALL)
    layout = draw(st.sampled_from(["contiguous", "padded", "inner2", "expanded_rows"]))
    sources = {
        "query": tensor((*batch, rows, embed), dtype, layout),
        "key": tensor((*batch, keys, kdim), dtype, layout),
        "value": tensor((*batch, keys, vdim), dtype, "contiguous"),
    }
    if draw(st.booleans()):
        sources["attn_mask"] = draw(
            st.sampled_from(["torch.rand({}) < 0.7", "torch.randn({}, dtype=torch." + dtype + ")"])
        ).format(draw(st.sampled_from([(rows, keys), (1, keys), (heads, rows, keys)])))
    if draw(st.booleans()):
        sources["key_mask"] = f"torch.rand({draw(st.sampled_from([(*batch, keys), (keys,)]))}) < 0.7"
    if draw(st.integers(0, 3)) == 3:
        sources["relative_bias"] = draw(biases([(heads,), (*batch, heads)], dtype))
    given = {
        "is_causal": draw(st.booleans()), "need_weights": draw(st.booleans()),
        "window": draw(st.one_of(st.none(), st.tuples(WINDOW_SIDE, WINDOW_SIDE))),
    }  # fmt: skip
    sources |= draw(options(given, {"is_causal": False, "need_weights": False, "window": None}))
    return Call(function, tuple(sources.items()), draw(st.integers(0, 9)), draw(st.integers(0, 7)) == 7)


@st.composite
def jagged_calls(draw: st.DrawFn) -> Call:
    """scaled_dot_product_attention of nested tensors of layout torch.jagged."""
    lengths = draw(st.lists(st.tuples(SMALL, SMALL), min_size=0, max_size=4))
    rows, keys = [one[0] for one in lengths], [one[1] for one in lengths]
    with_heads = draw(st.integers(0, 3)) < 3
    kv_heads, group = (draw(st.integers(1, 3)), draw(st.integers(1, 3))) if with_heads else (1, 1)
    width, value_width, dtype = draw(WIDTHS), draw(WIDTHS), draw(st.sampled_from(list(DTYPES)))
    gaps = draw(st.integers(0, 2))  # rows after each sequence that belong to none
    sources = {}
    for name, sizes, heads, columns in (
        ("query", rows, (kv_heads * group,), width),
        ("key", keys, (kv_heads,), width),
        ("value", keys, (kv_heads,), value_width),
    ):
        shape = (*(heads if with_heads else ()), columns)
        if gaps or not lengths or draw(st.booleans()):
            total = sum(sizes) + gaps * len(sizes)
            values = tensor((total, *shape), dtype, draw(st.sampled_from(LAYOUTS)))
            begins = ends([size + gaps for size in sizes], "torch.int64")
            lengths_given = f", torch.tensor({sizes}, dtype=torch.int64)" if gaps else ""
            source = f"torch.nested.nested_tensor_from_jagged({values}, {begins}{lengths_given})"
        else:
            parts = ", ".join(tensor((size, *shape), dtype, "contiguous") for size in sizes)
            source = f"torch.nested.nested_tensor([{parts}], layout=torch.jagged)"
        sources[name] = f"{source}.transpose(1, 2)" if with_heads else source
    heads = kv_heads * group
    given = {
        "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.25])), "is_causal": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 0.5, -0.3])), "enable_gqa": group > 1,
        "causal_alignment": draw(st.sampled_from(["upper_left", "lower_right"])),
        "window": draw(st.one_of(st.none(), st.tuples(WINDOW_SIDE, WINDOW_SIDE))),
        "softcap": draw(st.sampled_from([None, 0.5, 20.0])), "return_lse": draw(st.booleans()),
    }  # fmt: skip
    if draw(st.integers(0, 3)) == 3:
        sources["alibi_slopes"] = f"torch.rand({draw(st.sampled_from([(heads,), (len(lengths), heads)]))})"
    if draw(st.integers(0, 3)) == 3:
        sources["relative_bias"] = draw(biases([(heads,), (len(lengths), heads), (1,)], dtype))
    sources |= draw(options(given, DEFAULTS))
    return Call(SDPA, tuple(sources.items()), draw(st.integers(0, 9)), draw(st.integers(0, 7)) == 7)


# Every argument of the functions that the calls may lack.
ARGUMENTS = {
    SDPA: "attn_mask alibi_slopes relative_bias block_mask score_mod " + " ".join(DEFAULTS),
    VARLEN: "alibi_slopes relative_bias attn_mask k_scale v_scale num_splits seqused_k block_table window_size "
    "return_aux return_lse is_causal scale softcap dropout_p enable_gqa causal_alignment window",
    MODULE: "attn_mask key_mask relative_bias is_causal need_weights window",
} | flash_attn.ARGUMENTS


@st.composite
def spoilt_calls(draw: st.DrawFn, right: st.SearchStrategy[Call]) -> Call:
    """A right call in which one or two arguments are replaced, changed or left out."""
    call = draw(right)
    sources = dict(call.arguments)
    optional = ARGUMENTS[call.name].split()
    names = [*sources, *optional]
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(names))
        how = draw(st.sampled_from(["strange", "strange", "tensor", "spoilt", "absent"]))
        if how == "spoilt" and "torch." in sources.get(name, ""):
            sources[name] = draw(st.sampled_from(SPOILT)).format(sources[name])
        elif name == "score_mod" and how != "strange":
            sources[name] = draw(st.sampled_from(HOSTILE))
        elif how == "absent" and name in optional:
            sources.pop(name, None)
        else:
            sources[name] = draw(st.sampled_from(STRANGE_TENSORS if how == "tensor" else STRANGE))
    return Call(call.function, tuple(sources.items()), call.seed, call.second)


# Jagged tensors take several times as long as others.
_OFTEN = [sdpa_calls(), varlen_calls(), module_calls(), flash_attn.calls()]
_RIGHT = [*_OFTEN, *_OFTEN, *_OFTEN, jagged_calls()]
CALLS = st.one_of(*_RIGHT, *map(spoilt_calls, _RIGHT))
