"""Strategies of hypothesis for score functions, as source text: random programs, and functions that are none."""

from __future__ import annotations

import hypothesis.strategies as st

from call_sources import tensor
from layouts import LAYOUTS

DEPTH = 8
# Names of a function's arguments, with the sizes of what they count.
Sizes = dict[str, int]

_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_BOUNDED = (
    "torch.tanh({})", "({}).sigmoid()", "torch.sin({})", "({}).cos()", "torch.erf({})", "-({})", "({}).abs()",
    "({}).clamp(-1.5, 2.0)", "torch.nn.functional.relu({})", "torch.exp(-({}).abs())", "torch.log1p(({}).abs())",
    "(({}).abs() + 0.5).sqrt()", "torch.expm1(({}).clamp(max=0.5))", "1 / (1 + ({}).abs())",
    "torch.log(({}).abs() + 1)", "(({}) ** 2 + 1).rsqrt()", "({}).abs().add(0.5).reciprocal()",
    "torch.nn.functional.softplus({})", "torch.nn.functional.silu({})", "torch.erfc({})", "torch.exp2(-({}).abs())",
)  # fmt: skip
_JOINED = (
    "({}) + ({})", "({}) - ({})", "({}) * torch.sigmoid({})", "({}) * torch.tanh({})", "torch.minimum({}, {})",
    "torch.maximum({}, {})", "({}) / (1 + ({}).abs())", "torch.add({}, {}, alpha=0.5)", "torch.lerp({}, {}, 0.25)",
    "(({}).abs() + 0.5) ** torch.tanh({})", "({}).masked_fill(({}) > 0.25, 0.5)",
)  # fmt: skip
_OF_INTEGERS = (
    "torch.tanh(({}).to(s.dtype) * 0.05)", "torch.log1p(torch.abs({}).to(s.dtype))",
    "(({}) % 7) * 0.25", "(({}) / 9).floor().clamp(-3, 3)",
    "torch.fmod(({}) / 4, 1.5)", "torch.remainder(({}) / 4, 1.5)", "torch.sign({}) * 0.5",
    "(({}) / 8).round().clamp(-2, 2)",
    "torch.sin(({}).to(s.dtype) / 5)", "(({}) / 5).trunc().clamp(-2, 2)", "(({}) / 6).ceil() % 3",
)  # fmt: skip
_JOINED_INTEGERS = (
    "({}) + ({})", "({}) - ({})", "torch.minimum({}, {})", "torch.maximum({}, {})", "({}) ^ ({})", "({}) & ({})",
    "({}) | ({})",
)  # fmt: skip
_CHANGED_INTEGERS = (
    "({}) * {}", "({}) // {}", "({}) % {}", "({}) + {}", "-({}) + {}", "torch.abs({}) >> {}", "({}).clamp(-2, {})",
    "torch.clamp({}, max={})", "torch.fmod({}, {})", "torch.div({}, {}, rounding_mode='trunc')", "-({})",
)  # fmt: skip

# Functions that are wrong, or wrong for some calls; {} is a tensor's number of entries.
HOSTILE = (
    "lambda s, b, h, i, j: s + torch.zeros(5)[j]", "lambda s, b, h, i, j: s + torch.zeros(3)[i - 2 * j]",
    "lambda s, b, h, i, j: s + torch.zeros(0)[j]", "lambda s, b, h, i, j: s + torch.zeros(4, 0)[h, j]",
    "lambda s, b, h, i, j: s + torch.zeros(2, 2)[h, b]", "lambda s, b, h, i, j: s * torch.ones(4, 3)[j]",
    "(lambda t: lambda s, b, h, i, j: s + t[j])(torch.zeros(4))",
    "(lambda t: lambda s, b, h, i, j: s + t[2 ** 40 * (j + 1)])(torch.zeros(4))",
    "(lambda t: lambda s, b, h, i, j: s + t[-2 ** 62 - j])(torch.zeros(4))",
    "(lambda t: lambda s, b, h, i, j: s + t[j * 2 ** 62])(torch.zeros(4))",
    "(lambda t: lambda s, b, h, i, j: s + t[(s * 1e30).long()])(torch.zeros(4))",
    "(lambda t: lambda s, b, h, i, j: s + t[(s / 0).long()])(torch.zeros(4))",
    "(lambda t: lambda s, b, h, i, j: s + t[j // 0])(torch.zeros(4))",
    "(lambda t: lambda s, b, h, i, j: s + t[j % (i - i)])(torch.zeros(4))",
    "(lambda t: lambda s, b, h, i, j: s + t[s])(torch.zeros(4))",
    "(lambda t: lambda s, b, h, i, j: s + t[t[h].long()])(torch.full((4,), 9.0))",
    "(lambda t, u: lambda s, b, h, i, j: s + u[t[j % 2]])(torch.tensor([0, 99]), torch.zeros(4))",
    "(lambda t: lambda s, b, h, i, j: s + t[h])(torch.zeros(4, device='meta'))",
    "(lambda t: lambda s, b, h, i, j: s + t[h])(torch.zeros(4, dtype=torch.complex64))",
    "(lambda t: lambda s, b, h, i, j: s + t[h])(torch.zeros(4).to_sparse())",
    "(lambda t: lambda s, b, h, i, j: s + t[h])([0.0, 1.0])",
    "(lambda t: lambda s, b, h, i, j: s + t[h])(numpy.zeros(4))",
    "(lambda t: lambda s, b, h, i, j: s + t)(numpy.zeros(4))",
    "(lambda t: lambda s, b, h, i, j: s + t[h, i, j])(torch.zeros(4))",
    "(lambda t: lambda s, b, h, i, j: s + t[h > 0])(torch.zeros(4))",
    "(lambda t: lambda s, b, h, i, j: s + t[i:j])(torch.zeros(4))",
    "(lambda t: lambda s, b, h, i, j: s + t.resize_(t.numel() + 1)[h])(torch.zeros(4))",
    "(lambda t: lambda s, b, h, i, j: s + t.add_(1)[h % 4])(torch.zeros(4))",
    "(lambda t: lambda s, b, h, i, j: s + t[h % 4].to(s.dtype))(torch.zeros(4, dtype=torch.float8_e4m3fn))",
    "(lambda t: lambda s, b, h, i, j: s + t[h % 4])(torch.zeros(4, dtype=torch.uint8))",
    "(lambda t: lambda s, b, h, i, j: torch.where(t[h % 4], s, -math.inf))(torch.zeros(4, dtype=torch.bool))",
    "(lambda t: lambda s, b, h, i, j: s + t)(torch.zeros(2, 3))", "lambda s, b, h, i, j: s.add_(1)",
    "lambda s, b, h, i, j: s if i > j else -s", "lambda s, b, h, i, j: s.item()", "lambda s, b, h, i, j: None",
    "lambda s, b, h, i, j: 's'", "lambda s, b, h, i, j: 1.0", "lambda s, b, h, i, j: True", "lambda s, b, h, i, j: j",
    "lambda s, b, h, i, j: j > i", "lambda s, b, h, i, j: s.expand(2, 3)",
    "lambda s, b, h, i, j: (s, s)", "lambda s, b, h, i, j: s.double()", "lambda s, b, h, i, j: s.half()",
    "lambda s, b, h, i, j: s + torch.rand(())", "lambda s, b, h, i, j: torch.lgamma(s)",
    "lambda s, b, h, i, j: s.sum()", "lambda s, b, h, i, j: s.softmax(0)", "lambda s, b, h, i, j: torch.sort(s)[0]",
    "lambda s, b, h, i, j: s * 10 ** 400", "lambda s, b, h, i, j: s * 1j", "lambda s, b, h, i, j: math.sqrt(s)",
    "lambda s, b, h, i, j: range(j)", "lambda s: s", "lambda *x: x[0]", "lambda s, b, h, i, j, k: s",
    "(lambda t: lambda s, b, h, i, j: s * t.item())(torch.tensor(2.0))",
    "(lambda t: lambda s, b, h, i, j: s * t.tolist()[0])(torch.ones(4))",
    "(lambda t: lambda s, b, h, i, j: s + t[t.nonzero()[0, 0]])(torch.ones(4))",
    "lambda s, b, h, i, j: s + s.detach()", "lambda s, b, h, i, j: j % 0", "lambda s, b, h, i, j: s * numpy.exp(h)",
    "lambda s, b, h, i, j: s + math.nan", "lambda s, b, h, i, j: s - math.inf",
    "lambda s, b, h, i, j: -math.inf",
    "scaledot.score_mods.alibi(torch.rand(3))", "scaledot.score_mods.relative_bias(torch.randn(2, 5))",
    "scaledot.score_mods.softcap(5.0)", "torch.tanh", "torch.nn.Tanh()",
)  # fmt: skip


class _Program:
    """One function while it is drawn."""

    def __init__(self, draw: st.DrawFn, sizes: Sizes, dtype: str) -> None:
        self._draw, self._sizes, self._dtype = draw, sizes, dtype
        self.captured: list[str] = []  # expressions of tensors

    def pick(self, *choices: str) -> str:
        return self._draw(st.sampled_from(choices))

    def depths(self, depth: int) -> tuple[int, int]:
        """Those of two operands: one is as deep as may be."""
        return depth - 1, self._draw(st.integers(0, min(2, depth - 1)))

    def number(self, depth: int) -> str:
        if depth <= 0 or self._draw(st.integers(0, 9)) == 9:
            kind = self.pick("score", "score", "load", "load", "constant", "odd")
            if kind == "constant":
                return repr(self._draw(st.sampled_from([-1.5, -0.25, 0.5, 2.0])))
            return "s" if kind == "score" else self.load("floating" if kind == "load" else "odd", 1)
        kind = self.pick("one", "one", "two", "two", "where", "integers", "truth")
        if kind == "one":
            return self.pick(*_BOUNDED).format(self.as_tensor(self.number(depth - 1)))
        if kind == "two":
            deep, shallow = self.depths(depth)
            operands = self.as_tensor(self.number(deep)), self.as_tensor(self.number(shallow))
            return self.pick(*_JOINED).format(*(operands if self._draw(st.booleans()) else operands[::-1]))
        if kind == "where":
            deep, shallow = self.depths(depth)
            operands = self.as_tensor(self.number(deep)), self.number(shallow)
            return f"torch.where({self.truth(shallow)}, {', '.join(operands)})"
        if kind == "truth":
            return f"({self.truth(depth - 1)}).to(s.dtype) * 0.75"
        # Torch makes float32 of integers, also in the oracle. What is not cast before is exact.
        return f"({self.pick(*_OF_INTEGERS).format(self.integer(depth - 1))}).to(s.dtype)"

    def as_tensor(self, source: str) -> str:
        """Constants have no methods."""
        return f"(s * 0 + {source})" if source.lstrip("-")[0].isdigit() else source

    def integer(self, depth: int) -> str:
        if depth <= 0:
            return self.load("integral", 0) if self._draw(st.integers(0, 4)) == 4 else self.pick(*self._sizes)
        deep, shallow = self.depths(depth)
        kind = self.pick("changed", "joined", "where")
        if kind == "changed":
            return self.pick(*_CHANGED_INTEGERS).format(self.integer(deep), self._draw(st.integers(1, 3)))
        if kind == "joined":
            return self.pick(*_JOINED_INTEGERS).format(self.integer(deep), self.integer(shallow))
        return f"torch.where({self.truth(shallow)}, {self.integer(deep)}, {self.integer(shallow)})"

    def truth(self, depth: int) -> str:
        if depth <= 0 and self._draw(st.integers(0, 3)) == 3:
            return self.load("bool", 0)
        deep, shallow = self.depths(max(depth, 1))
        kind = self.pick("compare", "compare", "and", "not") if depth > 0 else "compare"
        if kind == "compare":
            return f"(({self.integer(deep)}) {self.pick(*_COMPARISONS)} ({self.integer(shallow)}))"
        if kind == "not":
            return self.pick("~({})", "torch.logical_not({})").format(self.truth(deep))
        joined = self.pick("({}) & ({})", "({}) | ({})", "({}) ^ ({})", "torch.logical_or({}, {})")
        return joined.format(self.truth(deep), self.truth(shallow))

    def load(self, kind: str, depth: int) -> str:
        """A number of a tensor that the function captures, with an index within it for each dimension."""
        shape, places = [], []
        # Integers without dimensions, next to others, would have another dtype in the oracle.
        for _ in range(self._draw(st.integers(1 if kind == "integral" else 0, 4))):
            name = self.pick(*self._sizes)
            size = max(self._sizes[name], 1)
            how = self.pick("itself", "itself", "backwards", "remainder", "clamped", "number")
            if how == "remainder" or how == "clamped":
                size = self._draw(st.integers(1, 9))
                end = f"% {size}" if how == "remainder" else f".clamp(0, {size - 1})"
                places.append(f"({self.integer(depth)}).long(){end}")
            elif how == "number":
                places.append(str(self._draw(st.integers(-size, size - 1))))
            else:
                places.append(name if how == "itself" else f"-1 - {name}")
            shape.append(size)
        name = f"t{len(self.captured)}"
        self.captured.append(self.table(kind, tuple(shape)))
        element = f"{name}[{', '.join(places)}]" if places else name
        if not any(place.isidentifier() or "(" in place or "- " in place for place in places) and places:
            element = f"({element})"
        return f"{element}.to(s.dtype)" if kind == "odd" else element

    def table(self, kind: str, shape: tuple[int, ...]) -> str:
        if kind == "integral":
            dtype = self.pick("int64", "int32", "int16", "uint8")
            return f"torch.randint(0, 5, {shape}, dtype=torch.{dtype})"
        if kind == "bool":
            return f"torch.rand({shape}) < 0.6"
        dtype = self._dtype if kind == "floating" else self.pick("float64", "float32", "bfloat16", "float16")
        if not shape:
            return f"torch.randn((), dtype=torch.{dtype})"
        layout = self._draw(st.sampled_from(LAYOUTS)) if len(shape) > 1 else "inner2"
        source = tensor(shape, dtype, layout)
        return f"({source}).requires_grad_()" if self._draw(st.booleans()) else source


@st.composite
def score_mods(draw: st.DrawFn, batches: int, heads: int, rows: int, keys: int, dtype: str) -> str:
    """A function whose indices are within the tensors that it captures, as an expression."""
    program = _Program(draw, {"b": batches, "h": heads, "i": rows, "j": keys}, dtype)
    result = program.number(draw(st.integers(0, DEPTH)))
    if draw(st.integers(0, 3)) == 3:
        result = f"torch.where({program.truth(2)}, {result}, -math.inf)"
    function = f"lambda s, b, h, i, j: {result}"
    if not program.captured:
        return function
    names = ", ".join(f"t{k}" for k in range(len(program.captured)))
    return f"(lambda {names}: {function})({', '.join(program.captured)})"
