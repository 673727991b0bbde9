"""Strategies of hypothesis for calls of the Python functions: every argument, right and wrong.

A call is kept as source text, so that the smallest one that fails can be printed as a program and kept in a corpus.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st

from case_strategies import WINDOW_SIDE, Lengths, cases
from cases import DTYPES, Case
from layouts import LAYOUTS

SDPA, VARLEN, MODULE = (
    "scaledot.scaled_dot_product_attention",
    "scaledot.varlen_attention",
    "scaledot.MultiHeadAttention",
)
NAMES = "import math, numpy, torch, scaledot"
Sources = dict[str, str]


@dataclass(frozen=True)
class Call:
    """A call of a public function, as source text."""

    function: str  # an expression: the function, or a module with its constructor's arguments
    arguments: tuple[tuple[str, str], ...]  # names and expressions
    seed: int = 0
    second: bool = False  # also the gradients of the gradients

    def program(self) -> str:
        """The call as a program that runs."""
        lines = [NAMES, f"torch.manual_seed({self.seed})"]
        lines += [f"{name} = {source}" for name, source in self.arguments]
        given = ", ".join(f"{name}={name}" for name, _ in self.arguments)
        return "\n".join([*lines, f"print({self.function}({given}))"])


SMALL: Lengths = st.one_of(st.integers(1, 9), st.integers(0, 40), st.sampled_from([16, 17, 33]))
WIDTHS: Lengths = st.one_of(st.integers(1, 9), st.sampled_from([0, 16, 17, 24]))
NUMBER_FORMS = ("{}", "{}", "{}", "numpy.float32({})", "numpy.float64({})", "torch.tensor({})")
INTEGER_FORMS = ("{}", "{}", "{}", "numpy.int64({})", "torch.tensor({})")
# Values that some argument takes, and most do not. An argument that takes one must do what it means there.
STRANGE = (
    "None", "0", "1", "-1", "3", "2**31", "2**63", "10**400", "0.0", "0.5", "-2.0", "1e-300", "1e300", "3e38", "1j",
    "math.nan", "math.inf", "-math.inf", "True", "False", "''", "'x'", "b'x'", "'lower_right'", "[]", "[1.0]", "(1, 2)",
    "(0, None)", "(-1, -1)", "(2**62, 0)", "(1.5, 0)", "(1, 2, 3)", "{}", "{1: 2}", "object()", "float", "len",
    "numpy.float32(0.5)", "numpy.int64(3)", "numpy.bool_(True)", "numpy.ones((2, 3))", "numpy.array(0.5)",
    "torch.float32", "torch.device('cpu')", "torch.nn.Linear(2, 2)",
)  # fmt: skip
STRANGE_TENSORS = (
    "torch.tensor(0.5)", "torch.tensor(3)", "torch.tensor(True)", "torch.tensor(math.nan)", "torch.tensor([3])",
    "torch.tensor(0.5, requires_grad=True)", "torch.zeros(0)", "torch.zeros(0, 0, 0, 0)", "torch.ones(2, 3)",
    "torch.ones(2, 3, dtype=torch.int64)", "torch.ones(2, 3) > 0", "torch.ones(2, 3, dtype=torch.complex64)",
    "torch.ones(1, 1, 1, 1, 1, 1, 1, 1)", "torch.ones(2, 3).to_sparse()", "torch.ones(2, 3, device='meta')",
    "torch.ones(3, dtype=torch.int32)", "torch.tensor([0, -1])", "torch.tensor([0, 2**40])", "torch.tensor([-1, 0])",
    "torch.nn.Parameter(torch.ones(2, 3))", "torch.ones(2, 3).expand(4, 2, 3)", "torch.ones(3, 2, dtype=torch.int8)",
    "torch.empty(2, 3, dtype=torch.float8_e4m3fn)", "torch.ones(2, 3).to_mkldnn()",
)  # fmt: skip
# What is wrong with a tensor that fits otherwise.
SPOILT = (
    "({}).double()", "({}).half()", "({}).to(torch.int32)", "({}) > 0", "({}).cfloat()", "({})[..., :-1]", "({})[0]",
    "({})[None]", "({}).mT", "({}).transpose(0, -1)", "({}).flatten()", "({}).to('meta')", "({}).to_sparse()",
    "({}).requires_grad_(False)", "torch.cat([{0}, {0}], -1)", "torch.cat([{0}, {0}], 0)", "({})[..., :0]", "({})[:0]",
    "torch.zeros_like({})", "({}).detach()", "torch.nested.nested_tensor([{}])", "[{}]", "({}).numpy()",
    "({}).to(torch.bfloat16)", "({}) * 100",
)  # fmt: skip


def tensor(shape: tuple[int, ...], dtype: str, layout: str) -> str:
    """An expression for normal numbers of this shape, in a memory layout (layouts.py)."""

    def randn(*sizes: int) -> str:
        return f"torch.randn({sizes}, dtype=torch.{dtype})"

    *lead, last = shape
    if layout == "transposed":
        return f"{randn(*shape[:-2], shape[-1], shape[-2])}.mT"
    if layout == "blhd" and len(shape) > 2:
        return f"{randn(*shape[:-3], shape[-2], shape[-3], last)}.transpose(-3, -2)"
    if layout == "inner2":
        return f"{randn(*lead, 2 * last)}[..., ::2]"
    if layout in ("padded", "misaligned"):
        return f"{randn(*lead, last + 3)}[..., 1:{last + 1}]"
    if layout == "expanded_rows":
        return f"{randn(*shape[:-2], 1, last)}.expand({shape})"
    return randn(*shape)


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


@st.composite
def _options(draw: st.DrawFn, options: dict[str, Any], defaults: dict[str, Any]) -> Sources:
    """Expressions of options; those at their default are left out, or not."""
    sources = {}
    for name, value in options.items():
        if value == defaults.get(name) and draw(st.integers(0, 3)) > 0:
            continue
        if type(value) is float and math.isfinite(value):
            sources[name] = draw(st.sampled_from(NUMBER_FORMS)).format(value)
        elif type(value) is int:
            sources[name] = draw(st.sampled_from(INTEGER_FORMS)).format(value)
        elif value == -math.inf:
            sources[name] = "-math.inf"
        elif isinstance(value, tuple) and draw(st.booleans()):
            sources[name] = repr(list(value))
        else:
            sources[name] = repr(value)
    return sources


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
    if rows and keys and draw(st.integers(0, 5)) == 0:
        shape = (rows, keys) if draw(st.booleans()) else (case.heads, rows, keys)
        size = draw(st.sampled_from(["1", "(2, 3)", "4", "(8, 5)", "16", "128"]))
        sources["block_mask"] = f"scaledot.BlockMask.from_dense(torch.rand({shape}) < 0.6, block_size={size})"
    options = case.functional_arguments() | {"return_lse": draw(st.booleans())}
    sources |= draw(_options(options, DEFAULTS))
    return Call(SDPA, tuple(sources.items()), draw(st.integers(0, 9)), draw(st.integers(0, 4)) == 0)


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

    def ends(sizes: list[int]) -> str:
        return f"torch.tensor({[sum(sizes[:k]) for k in range(len(sizes) + 1)]}, dtype={index})"

    sources["cu_seq_q"] = ends(rows)
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
        sources["cu_seq_k"] = ends(keys)
        if draw(st.integers(0, 3)) == 0:
            sources["seqused_k"] = f"torch.tensor({[number // 2 for number in keys]}, dtype={index})"
    cache = draw(st.sampled_from([None, None, None, *CACHES])) if dtype != "float64" else None
    if cache:
        sources["key"], sources["value"] = stored((*shape, width), cache), stored((*shape, value_width), cache)
        for name in ("k_scale", "v_scale"):
            if draw(st.integers(0, 3)) > 0:
                sizes = draw(st.sampled_from([(), (kv_heads,), (len(lengths), kv_heads)]))
                sources[name] = f"torch.rand({sizes}) * {CACHES[cache]}"
    else:
        sources["key"] = tensor((*shape, width), dtype, layouts[1])
        sources["value"] = tensor((*shape, value_width), dtype, layouts[2])
    options = {"max_q": max(rows, default=0) + draw(st.sampled_from([0, 0, 5])), "max_k": longest}
    options |= {
        "is_causal": draw(st.booleans()), "causal_alignment": draw(st.sampled_from(["upper_left", "lower_right"])),
        "window": draw(st.one_of(st.none(), st.tuples(WINDOW_SIDE, WINDOW_SIDE))),
        "softcap": draw(st.sampled_from([None, 0.5, 20.0])), "scale": draw(st.sampled_from([None, 0.5, -0.3])),
        "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.25])), "num_splits": draw(st.sampled_from([None, 1, 3])),
        "return_lse": draw(st.booleans()), "enable_gqa": group > 1,
    }  # fmt: skip
    if draw(st.integers(0, 3)) == 0:
        sources["alibi_slopes"] = f"torch.rand({kv_heads * group})"
    if draw(st.integers(0, 3)) == 0:
        sources["relative_bias"] = draw(biases([(kv_heads * group,), (len(lengths), kv_heads * group), (1,)], dtype))
    sources |= draw(_options(options, DEFAULTS | {"causal_alignment": "lower_right"}))
    second = not paged and not cache and draw(st.integers(0, 6)) == 0
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
    constructor = draw(_options(built, {"bias": True, "out_proj": True, "dropout": 0.0}))
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
    if draw(st.integers(0, 3)) == 0:
        sources["relative_bias"] = draw(biases([(heads,), (*batch, heads)], dtype))
    options = {
        "is_causal": draw(st.booleans()), "need_weights": draw(st.booleans()),
        "window": draw(st.one_of(st.none(), st.tuples(WINDOW_SIDE, WINDOW_SIDE))),
    }  # fmt: skip
    sources |= draw(_options(options, {"is_causal": False, "need_weights": False, "window": None}))
    return Call(function, tuple(sources.items()), draw(st.integers(0, 9)), draw(st.integers(0, 4)) == 0)


# Every argument of the functions that the calls may lack.
ARGUMENTS = {
    SDPA: "attn_mask alibi_slopes relative_bias block_mask " + " ".join(DEFAULTS),
    VARLEN: "alibi_slopes relative_bias k_scale v_scale num_splits seqused_k block_table window_size return_aux "
    "return_lse is_causal scale softcap dropout_p enable_gqa causal_alignment window",
    MODULE: "attn_mask key_mask relative_bias is_causal need_weights window",
}


@st.composite
def spoilt_calls(draw: st.DrawFn, right: st.SearchStrategy[Call]) -> Call:
    """A right call in which one or two arguments are replaced, changed or left out."""
    call = draw(right)
    sources = dict(call.arguments)
    names = [*sources, *ARGUMENTS[call.function.partition("(")[0]].split()]
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(names))
        how = draw(st.sampled_from(["strange", "strange", "tensor", "spoilt"]))
        if how == "spoilt" and "torch." in sources.get(name, ""):
            sources[name] = draw(st.sampled_from(SPOILT)).format(sources[name])
        else:
            sources[name] = draw(st.sampled_from(STRANGE_TENSORS if how == "tensor" else STRANGE))
    return Call(call.function, tuple(sources.items()), call.seed, call.second)


_RIGHT = (sdpa_calls(), varlen_calls(), module_calls())
CALLS = st.one_of(*_RIGHT, *map(spoilt_calls, _RIGHT))
