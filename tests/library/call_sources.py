"""A call of a Python function as source text, and texts of arguments, right and wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st

NAMES = "import math, numpy, torch, scaledot"
Sources = dict[str, str]


SMALL: st.SearchStrategy[int] = st.one_of(st.integers(1, 9), st.integers(0, 40), st.sampled_from([16, 17, 33]))
WIDTHS: st.SearchStrategy[int] = st.one_of(st.integers(1, 9), st.sampled_from([0, 16, 17, 24]))


@dataclass(frozen=True)
class Call:
    """A call of a public function, as source text."""

    function: str  # an expression: the function, or a module with its constructor's arguments
    arguments: tuple[tuple[str, str], ...]  # names and expressions
    seed: int = 0
    second: bool = False  # also the gradients of the gradients

    @property
    def name(self) -> str:
        """The function's name, without a constructor's arguments."""
        return self.function.partition("(")[0]

    def program(self) -> str:
        """The call as a program that runs."""
        lines = [NAMES, f"torch.manual_seed({self.seed})"]
        lines += [f"{name} = {source}" for name, source in self.arguments]
        given = ", ".join(f"{name}={name}" for name, _ in self.arguments)
        return "\n".join([*lines, f"print({self.function}({given}))"])


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


def ends(sizes: list[int], dtype: str) -> str:
    """An expression for 0 and the end of each sequence of these lengths."""
    return f"torch.tensor({[sum(sizes[:k]) for k in range(len(sizes) + 1)]}, dtype={dtype})"


@st.composite
def options(draw: st.DrawFn, values: dict[str, Any], defaults: dict[str, Any]) -> Sources:
    """Expressions of options; those at their default are left out, or not."""
    sources = {}
    for name, value in values.items():
        absent = draw(st.integers(0, 3)) < 3  # drawn for every value, so that none is simpler than its default
        if absent and value == defaults.get(name):
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
