"""Strategies of hypothesis for right calls of the functions of scaledot.dropin.flash_attn."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st

from call_sources import SMALL, WIDTHS, Call, ends, options, tensor
from cases import DTYPES
from layouts import EXPANDED, LAYOUTS

NAME = "scaledot.dropin.flash_attn.flash_attn_"
DENSE, DENSE_KV, DENSE_QKV = (f"{NAME}{form}func" for form in ("", "kvpacked_", "qkvpacked_"))
VARLEN, VARLEN_KV, VARLEN_QKV = (f"{NAME}varlen_{form}func" for form in ("", "kvpacked_", "qkvpacked_"))
KVCACHE = f"{NAME}with_kvcache"
DEFAULTS: dict[str, Any] = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
    "deterministic": False, "return_attn_probs": False,
    "cache_seqlens": None, "rotary_interleaved": True, "num_splits": 0, "return_softmax_lse": False,
}  # fmt: skip
OPTIONS = "softmax_scale causal window_size softcap alibi_slopes"
ARGUMENTS = {
    **dict.fromkeys([DENSE, DENSE_KV, DENSE_QKV, VARLEN_KV, VARLEN_QKV],
                    f"{OPTIONS} dropout_p deterministic return_attn_probs"),
    VARLEN: f"{OPTIONS} dropout_p deterministic return_attn_probs block_table",
    KVCACHE: f"{OPTIONS} k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table "
    "rotary_interleaved num_splits return_softmax_lse",
}  # fmt: skip
SIDE = st.one_of(st.sampled_from([-1, -1, -7]), st.integers(0, 40))
INDEX = st.sampled_from(["torch.int32", "torch.int64"])
WRITABLE = [layout for layout in LAYOUTS if layout not in EXPANDED]  # no number stands for two


@st.composite
def heads_and_widths(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(query heads, KV heads, width of queries and keys, width of values)."""
    kv_heads = draw(st.integers(1, 3))
    return kv_heads * draw(st.integers(1, 3)), kv_heads, draw(WIDTHS), draw(WIDTHS)


@st.composite
def common(draw: st.DrawFn, batch: int, heads: int) -> dict[str, str]:
    """Expressions of the options that all functions have."""
    values = {
        "softmax_scale": draw(st.sampled_from([None, 0.5, -0.3])), "causal": draw(st.booleans()),
        "window_size": draw(st.tuples(SIDE, SIDE)), "softcap": draw(st.sampled_from([0.0, 0.0, 0.5, 20.0])),
    }  # fmt: skip
    sources: dict[str, str] = draw(options(values, DEFAULTS))
    if draw(st.integers(0, 3)) == 3:
        sources["alibi_slopes"] = f"torch.rand({draw(st.sampled_from([(heads,), (batch, heads)]))})"
    return sources


@st.composite
def with_gradients(draw: st.DrawFn) -> dict[str, str]:
    """Expressions of the options of the functions that have gradients."""
    dropout = draw(st.sampled_from([0.0, 0.0, 0.25]))
    values = {"dropout_p": dropout, "deterministic": draw(st.booleans()), "return_attn_probs": draw(st.booleans())}
    return draw(options(values, DEFAULTS))


@st.composite
def tensors(
    draw: st.DrawFn, form: str, rows: tuple[int, ...], keys: tuple[int, ...], sizes: tuple[int, ...]
) -> dict[str, str]:
    """Expressions of q, k and v, or of those that hold several."""
    heads, kv_heads, width, value_width = sizes
    shapes = {
        "": {"q": (*rows, heads, width), "k": (*keys, kv_heads, width), "v": (*keys, kv_heads, value_width)},
        "kvpacked_": {"q": (*rows, heads, width), "kv": (*keys, 2, kv_heads, width)},
        "qkvpacked_": {"qkv": (*rows, 3, heads, width)},
    }[form]
    dtype = draw(st.sampled_from(list(DTYPES)))
    return {name: tensor(shape, dtype, draw(st.sampled_from(LAYOUTS))) for name, shape in shapes.items()}


FORMS = st.sampled_from(["", "", "kvpacked_", "qkvpacked_"])


@st.composite
def dense_calls(draw: st.DrawFn) -> Call:
    form, batch = draw(FORMS), draw(st.integers(0, 3))
    sizes = draw(heads_and_widths())
    sources = draw(tensors(form, (batch, draw(SMALL)), (batch, draw(SMALL)), sizes))
    sources |= draw(common(batch, sizes[0])) | draw(with_gradients())
    return Call(f"{NAME}{form}func", tuple(sources.items()), draw(st.integers(0, 9)), draw(st.integers(0, 7)) == 7)


@st.composite
def varlen_calls(draw: st.DrawFn) -> Call:
    form, index = draw(FORMS), draw(INDEX)
    lengths = draw(st.lists(st.tuples(SMALL, SMALL), min_size=0, max_size=4))
    rows, keys = [one[0] for one in lengths], [one[1] for one in lengths]
    sizes = draw(heads_and_widths())
    longest, longest_key = (max(each, default=0) + draw(st.sampled_from([0, 0, 5])) for each in (rows, keys))
    paged = not form and draw(st.integers(0, 2)) == 2
    key_shape: tuple[int, ...] = (sum(keys),)
    placed = {}
    if paged:
        size = draw(st.integers(1, 9))
        columns = -(-max(keys, default=0) // size)
        pages = max(columns, 1) + draw(st.integers(0, 3))
        table = [[(3 * b + 5 * k) % pages for k in range(columns)] for b in range(len(lengths))]
        placed["block_table"] = f"torch.tensor({table}, dtype={index}).reshape({(len(lengths), columns)})"
        key_shape = (pages, size)
    sources = draw(tensors(form, (sum(rows),), key_shape, sizes))
    if form == "qkvpacked_":
        sources |= {"cu_seqlens": ends(rows, index), "max_seqlen": str(longest)}
    else:
        sources |= {"cu_seqlens_q": ends(rows, index), "cu_seqlens_k": ends(keys, index)}
        sources |= draw(options({"max_seqlen_q": longest, "max_seqlen_k": longest_key}, {}))
    sources |= placed | draw(common(len(lengths), sizes[0])) | draw(with_gradients())
    call = f"{NAME}varlen_{form}func"
    return Call(call, tuple(sources.items()), draw(st.integers(0, 9)), not paged and draw(st.integers(0, 6)) == 6)


@st.composite
def cache_calls(draw: st.DrawFn) -> Call:
    batch, rows, index = draw(st.integers(0, 3)), draw(SMALL), draw(INDEX)
    heads, kv_heads, width, value_width = draw(heads_and_widths())
    dtype = draw(st.sampled_from(list(DTYPES)))
    appends = draw(st.booleans())
    new = draw(st.integers(0, 6)) if appends else 0
    capacity = new + draw(SMALL)
    sources = {"q": tensor((batch, rows, heads, width), dtype, draw(st.sampled_from(LAYOUTS)))}
    kind = draw(st.sampled_from(["plain", "rows", "left", "pages"]))
    extra = draw(st.integers(0, 2))
    placed = {}
    if kind == "pages":
        size = draw(st.integers(1, 9))
        columns = -(-capacity // size)
        capacity = columns * size
        order = draw(st.permutations(range(batch * columns + extra + 1)))  # two sequences never write to one page
        table = [order[b * columns : (b + 1) * columns] for b in range(batch)]
        placed["block_table"] = f"torch.tensor({table}, dtype={index}).reshape({(batch, columns)})"
        shape = (len(order), size)
    else:
        shape = (batch + extra, capacity)
    used = [draw(st.integers(0, capacity - new)) for _ in range(batch)]
    if kind == "rows":
        order = draw(st.permutations(range(batch + extra)))
        placed["cache_batch_idx"] = f"torch.tensor({order[:batch]}, dtype={index})"
    elif kind == "left":
        placed["cache_leftpad"] = f"torch.tensor({[draw(st.integers(0, capacity)) for _ in used]}, dtype={index})"
    for name, columns in (("k", width), ("v", value_width)):
        layout = draw(st.sampled_from(WRITABLE))
        sources[f"{name}_cache"] = tensor((*shape, kv_heads, columns), dtype, layout)
        if appends:
            sources[name] = tensor((batch, new, kv_heads, columns), dtype, draw(st.sampled_from(LAYOUTS)))
    seqlens = draw(st.sampled_from(["tensor", "tensor", "number", "none"]))
    if seqlens == "number":
        placed["cache_seqlens"] = str(min(used, default=0))
    elif seqlens == "tensor" or appends:
        placed["cache_seqlens"] = f"torch.tensor({used}, dtype={index})"
    if appends and draw(st.booleans()):
        table = (capacity + rows + draw(st.integers(0, 3)), draw(st.integers(0, width // 2)))
        angles = f"torch.randn({table}, dtype=torch.{dtype})"
        placed |= {"rotary_cos": f"{angles}.cos()", "rotary_sin": f"{angles}.sin()"}
    values = {
        "rotary_interleaved": draw(st.booleans()), "num_splits": draw(st.sampled_from([0, 0, 1, 3])),
        "return_softmax_lse": draw(st.booleans()),
    }  # fmt: skip
    sources |= placed | draw(common(batch, heads)) | draw(options(values, DEFAULTS))
    return Call(KVCACHE, tuple(sources.items()), draw(st.integers(0, 9)))


def calls() -> st.SearchStrategy[Call]:
    return st.one_of(dense_calls(), varlen_calls(), cache_calls())
