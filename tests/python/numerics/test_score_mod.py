"""score_mod: score functions of the user, against the formula on all scores in float64 and its autograd."""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import math
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import scaledot
from scaledot._score import score_arguments

SHAPE = {"batch": 2, "heads": 4, "kv_heads": 4, "rows": 37, "keys": 53, "head_dim": 16}
LIMITS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def every_score(score_mod: Callable[..., Tensor], scores: Tensor) -> Tensor:
    """score_mod of all scores, (B, H, Lq, Lk)."""
    places = [torch.arange(size) for size in scores.shape]
    f = score_mod
    for dims in (
        (0, None, None, None, 0),
        (0, None, None, 0, None),
        (0, None, 0, None, None),
        (0, 0, None, None, None),
    ):
        f = torch.vmap(f, in_dims=dims)
    return f(scores, *places)


def formula(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor], attends: Tensor | None = None
) -> Tensor:
    groups = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = every_score(score_mod, query @ key.mT / math.sqrt(query.size(-1)))
    if attends is not None:
        scores = scores.masked_fill(~attends, -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return weights @ value


class Captured:
    """Tensors that score functions capture, in float64 for the formula or in float32."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        batch, heads, rows, keys = (SHAPE[name] for name in ("batch", "heads", "rows", "keys"))

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

        self.slopes = numbers(heads)
        self.gate = numbers()
        self.by_row, self.by_key = numbers(rows), numbers(keys)
        self.relative = numbers(heads, 2 * 8 + 1)
        self.full = numbers(batch, heads, rows, keys)
        self.document = torch.randint(0, 3, (keys,), generator=generator)
        self.wide = numbers(heads, 120)
        self.steep, self.steeps = numbers(heads).detach(), numbers(batch, heads).detach()

    def floating(self) -> list[Tensor]:
        return [tensor for tensor in vars(self).values() if tensor.requires_grad]


def _dilated(c: Captured) -> Callable[..., Tensor]:
    return lambda s, b, h, q, k: torch.where((q - k) % 3 == 0, s, -math.inf)


def _relative(c: Captured) -> Callable[..., Tensor]:
    return lambda s, b, h, q, k: s + c.relative[h, (k - q).clamp(-8, 8) + 8]


def _document(c: Captured) -> Callable[..., Tensor]:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(c.document[q] == c.document[k], s + c.slopes[h] * (k - q).abs(), -math.inf)

    return score_mod


def _gated(c: Captured) -> Callable[..., Tensor]:
    return lambda s, b, h, q, k: s * torch.sigmoid(c.gate) + torch.sigmoid(c.by_row[q]) * c.by_key[k]


def _mixed(c: Captured) -> Callable[..., Tensor]:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        far = torch.log1p((q - k).abs().float() + c.gate.exp())
        wave = torch.sin(c.by_row[q] * 0.5) * torch.cos(c.by_key[-1 - k])
        s = s - c.slopes[h].abs() * far + wave + torch.erf(s) - torch.sqrt(s * s + 1)
        return torch.where((b == 1) & (k // 4 > q // 4), s.clamp(-1.0, 1.0), s + torch.exp(-far))

    return score_mod


FUNCTIONS: dict[str, Callable[[Captured], Callable[..., Tensor]]] = {
    "identity": lambda c: lambda s, b, h, q, k: s,
    "alibi": lambda c: lambda s, b, h, q, k: s + c.slopes[h] * (k - q),
    "softcap": lambda c: lambda s, b, h, q, k: 2 * torch.tanh(s / 2),
    "relative": _relative,
    "document": _document,
    "dilated": _dilated,
    "gated": _gated,
    "full table": lambda c: lambda s, b, h, q, k: s + c.full[b, h, q, k],
    "a table of one head, then its rows": lambda c: lambda s, b, h, q, k: s + c.full[b][h][q, k] * c.full[0, 1, q][k],
    "powers": lambda c: lambda s, b, h, q, k: s + (c.by_key[k].abs() + 0.5) ** c.slopes[h] + s**2 / (1 + s**4).sqrt(),
    "minimum": lambda c: lambda s, b, h, q, k: torch.minimum(s, c.by_row[q]) + torch.maximum(c.by_key[k], c.slopes[h]),
    "remainder": lambda c: lambda s, b, h, q, k: s + torch.remainder(c.by_key[k], 0.7) + torch.fmod(c.by_row[q], 0.3),
    "a key's own number": lambda c: lambda s, b, h, q, k: c.by_key[k],
    "computed": lambda c: lambda s, b, h, q, k: s + (c.slopes * 2).tanh()[h] * c.full.sum(0)[h, q, k],
    "mixed": _mixed,
}  # fmt: skip


def inputs(dtype: torch.dtype, **sizes: int) -> list[Tensor]:
    s = {**SHAPE, **sizes}
    generator = torch.Generator().manual_seed(1)
    shapes = [(s["heads"], s["rows"]), (s["kv_heads"], s["keys"]), (s["kv_heads"], s["keys"])]
    return [
        torch.randn(s["batch"], heads, length, s["head_dim"], generator=generator).to(dtype).requires_grad_()
        for heads, length in shapes
    ]


def compared(
    name: str, dtype: torch.dtype, attends: Tensor | None = None, sizes: dict[str, int] | None = None, **options: Any
) -> None:
    tensors = inputs(dtype, **(sizes or {}))
    ours = Captured(torch.float64 if dtype == torch.float64 else torch.float32)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    theirs = Captured(torch.float64)
    with torch.no_grad():
        for a, b in zip(vars(ours).values(), vars(theirs).values(), strict=True):
            b.copy_(a)
    output = scaledot.scaled_dot_product_attention(*tensors, score_mod=FUNCTIONS[name](ours), **options)
    wanted = formula(*exact, FUNCTIONS[name](theirs), attends)
    assert output.dtype == dtype
    assert (output - wanted).abs().max() < LIMITS[dtype]
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = torch.autograd.grad(output, tensors + ours.floating(), grad.to(dtype), allow_unused=True)
    right = torch.autograd.grad(wanted, exact + theirs.floating(), grad.to(dtype).double(), allow_unused=True)
    names = ["query", "key", "value", *(n for n, t in vars(ours).items() if t.requires_grad)]
    for tensor, got, want in zip(names, found, right, strict=True):
        if want is None or not want.any():
            assert got is None or got.abs().max() < LIMITS[dtype], tensor
            continue
        scale = max(1.0, float(want.abs().max()))
        assert got is not None, tensor
        assert (got - want).abs().max() < 8 * LIMITS[dtype] * scale, (tensor, float((got - want).abs().max()), scale)


@pytest.mark.parametrize("dtype", list(LIMITS), ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_function(name: str, dtype: torch.dtype) -> None:
    compared(name, dtype)


def places() -> tuple[Tensor, Tensor]:
    return torch.arange(SHAPE["rows"])[:, None], torch.arange(SHAPE["keys"])


@pytest.mark.parametrize("name", ["alibi", "document", "mixed"])
@pytest.mark.parametrize("mask", ["causal", "window", "boolean", "blocks", "floating"])
def test_with_masks(name: str, mask: str) -> None:
    i, j = places()
    generator = torch.Generator().manual_seed(3)
    boolean = torch.rand(SHAPE["rows"], SHAPE["keys"], generator=generator) < 0.5
    boolean[5] = False
    floating = torch.zeros(boolean.shape).masked_fill(~boolean, -math.inf)
    block_mask = create_block_mask(
        lambda b, h, q, k: k <= q, None, None, SHAPE["rows"], SHAPE["keys"], device="cpu", BLOCK_SIZE=16
    )
    options, attends = {
        "causal": ({"is_causal": True}, j <= i),
        "window": ({"window": (9, 4)}, (j >= i - 9) & (j <= i + 4)),
        "boolean": ({"attn_mask": boolean}, boolean),
        "blocks": ({"block_mask": block_mask}, j <= i),
        "floating": ({"attn_mask": floating}, boolean),
    }[mask]
    compared(name, torch.float32, attends, **options)


@pytest.mark.parametrize("name", ["alibi", "relative", "full table", "mixed"])
def test_shared_heads(name: str) -> None:
    compared(name, torch.float32, sizes={"kv_heads": 2}, enable_gqa=True)


@pytest.mark.parametrize("name", ["gated", "document"])
@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows(name: str, rows: int) -> None:
    compared(name, torch.float32, sizes={"rows": rows})


# ------------------------------------------------------------------------------------------------ the same every way
def captured_case() -> tuple[list[Tensor], Callable[..., Tensor], list[Tensor]]:
    """A call with a full table, which one task sums, and small ones, of which each task has its own sums."""
    generator = torch.Generator().manual_seed(4)
    tensors = [torch.randn(3, 4, 200, 16, generator=generator).requires_grad_() for _ in range(3)]
    gate, full = torch.tensor(1.2, requires_grad=True), torch.randn(4, 200, 200, generator=generator).requires_grad_()
    distance = torch.randn(399, generator=generator).requires_grad_()

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * gate + full[h, q, k] + distance[k - q + 199]

    return tensors, score_mod, [*tensors, gate, full, distance]


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    tensors, score_mod, leaves = captured_case()
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            output = scaledot.scaled_dot_product_attention(*tensors, score_mod=score_mod)
            found.append([output, *torch.autograd.grad(output.sin().sum(), leaves)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_compiled_in_one_graph(name: str) -> None:
    tensors, captured = inputs(torch.float32), Captured(torch.float32)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaledot.scaled_dot_product_attention(query, key, value, score_mod=FUNCTIONS[name](captured))

    torch._dynamo.reset()
    found = []
    for function in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        output = function(*tensors)
        found.append([output, *torch.autograd.grad(output.sum(), tensors + captured.floating(), allow_unused=True)])
    for eager, compiled in zip(*found, strict=True):
        assert (eager is None) is (compiled is None)
        assert eager is None or torch.equal(eager, compiled)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.rand(4))

    def forward(self, query: Tensor) -> Tensor:
        def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s - self.slopes[h] * (q - k).abs()

        return scaledot.scaled_dot_product_attention(query, query, query, score_mod=score_mod)


def test_exported() -> None:
    module, query = Attention(), torch.randn(2, 4, 20, 16)
    program = torch.export.export(module, (query,)).module()
    assert torch.equal(program(query), module(query))


@pytest.mark.parametrize("name", ["relative", "document", "dilated", "full table", "mixed"])
def test_large_positions_are_computed_as_integers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They give the numbers that small ones give as floating numbers."""
    tensors, captured = inputs(torch.float32), Captured(torch.float32)
    wanted = scaledot.scaled_dot_product_attention(*tensors, score_mod=FUNCTIONS[name](captured))
    monkeypatch.setattr("scaledot._score.arguments.SMALL", 0)
    found = scaledot.scaled_dot_product_attention(*tensors, score_mod=FUNCTIONS[name](captured))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_vmap_over_the_batch() -> None:
    captured = Captured(torch.float32)
    queries = torch.randn(3, 2, 4, 37, 16)

    def attend(query: Tensor) -> Tensor:
        score_mod = lambda s, b, h, q, k: s + captured.by_row.detach()[b]  # noqa: E731
        return scaledot.scaled_dot_product_attention(query, query, query, score_mod=score_mod)

    assert torch.equal(torch.vmap(attend)(queries), torch.stack([attend(query) for query in queries]))


def test_weights_and_lse() -> None:
    query, key, value = inputs(torch.float32)
    captured = Captured(torch.float32)
    output, weights, lse = scaledot.scaled_dot_product_attention(
        query, key, value, score_mod=_document(captured), return_weights=True, return_lse=True
    )
    scores = every_score(_document(captured), query @ key.mT / 4)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(weights, scores.softmax(-1))
    torch.testing.assert_close(weights @ value, output)


def test_a_hidden_key_may_be_nan() -> None:
    query, key, value = (tensor.detach() for tensor in inputs(torch.float32))
    score_mod = lambda s, b, h, q, k: torch.where(k == 7, -math.inf, s)  # noqa: E731
    clean = scaledot.scaled_dot_product_attention(query, key, value, score_mod=score_mod)
    for tensor in (key, value):
        tensor[:, :, 7] = math.nan
    for tensor in (query, key, value):
        tensor.requires_grad_()
    output = scaledot.scaled_dot_product_attention(query, key, value, score_mod=score_mod)
    assert torch.equal(output, clean)
    for gradient in torch.autograd.grad(output.sum(), (query, key, value)):
        assert gradient.isfinite().all()


def test_a_row_without_keys() -> None:
    query, key, value = inputs(torch.float32)
    score_mod = lambda s, b, h, q, k: torch.where(q == 3, -math.inf, s)  # noqa: E731
    output, lse = scaledot.scaled_dot_product_attention(query, key, value, score_mod=score_mod, return_lse=True)
    assert not output[:, :, 3].any()
    assert (lse[:, :, 3] == -math.inf).all()
    for gradient in torch.autograd.grad(output.sum(), (query, key, value)):
        assert gradient.isfinite().all()


# ------------------------------------------------------------------------------------------------ captured values
class Gate(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.factor = 1.0

    def score_mod(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * self.weight[h] * self.factor


def test_captured_values_may_change() -> None:
    query, key, value = (tensor.detach() for tensor in inputs(torch.float32))
    gate = Gate()

    def is_scaled_by(factor: float) -> None:
        found = scaledot.scaled_dot_product_attention(query, key, value, score_mod=gate.score_mod)
        torch.testing.assert_close(found, scaledot.scaled_dot_product_attention(query, key, value, scale=factor / 4))

    is_scaled_by(1.0)
    with torch.no_grad():
        gate.weight.fill_(2.0)
    is_scaled_by(2.0)
    gate.weight = torch.nn.Parameter(torch.full((4,), 3.0))
    is_scaled_by(3.0)
    gate.factor = 0.5
    is_scaled_by(1.5)


FACTOR, TABLE = 1.0, torch.ones(4)
SETTINGS = types.ModuleType("settings_of_the_user")


class Settings:
    """Keeps a factor in an object that it refers to, in its class, and behind a property and an operator."""

    of_class = 1.0
    __slots__ = ("inner",)

    def __init__(self) -> None:
        self.inner = types.SimpleNamespace(factor=1.0, parts=collections.deque([1.0]))

    @property
    def factor(self) -> float:
        return float(self.inner.factor)

    def __rmul__(self, s: Tensor) -> Tensor:
        return s * self.inner.factor


def _changed_factor(place: str) -> tuple[Callable[..., Tensor], Callable[[float], Any]]:
    """A score function that multiplies by a factor of 1, which is in this place, and what changes the factor."""
    factor, table, numbers, array, settings = 1.0, torch.ones(4), {"factors": [1.0]}, np.ones(1), Settings()
    inner = lambda s: s * factor  # noqa: E731
    f: Any

    def change(x: float) -> None:
        nonlocal factor
        factor = x

    def replace(x: float) -> None:
        nonlocal table
        table = torch.full((4,), x)

    def resize(x: float) -> None:
        with torch.no_grad():
            table.resize_(4 + int(10 * x)).fill_(x)

    def swap(x: float) -> None:
        table.data = torch.full((4, 2), x).T[0]

    def of_default(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, by: float = 1.0, *, of: Any = None) -> Tensor:
        return s * by * (1.0 if of is None else of)

    match place:
        case "a number in the closure":
            return lambda s, b, h, q, k: s * factor, change
        case "a function in the closure":
            return lambda s, b, h, q, k: inner(s), change
        case "a tensor in the closure":
            return lambda s, b, h, q, k: s * table[h], lambda x: table.fill_(x)
        case "another tensor in the closure":
            return lambda s, b, h, q, k: s * table[h], replace
        case "a tensor of another size":
            return lambda s, b, h, q, k: s * table[h - 4 + 4], resize
        case "a tensor with other data":
            return lambda s, b, h, q, k: s * table[h], swap
        case "a computed tensor":
            return lambda s, b, h, q, k: s * (table * 2 - table)[h], lambda x: table.fill_(x)
        case "a list":
            return lambda s, b, h, q, k: s * numbers["factors"][0], lambda x: numbers["factors"].__setitem__(0, x)
        case "an array":
            return lambda s, b, h, q, k: s * float(array[0]), lambda x: array.fill(x)
        case "a default argument":
            return of_default, lambda x: setattr(of_default, "__defaults__", (x,))
        case "a default tensor":
            return of_default, lambda x: setattr(of_default, "__defaults__", (torch.tensor(x),))
        case "a keyword argument":
            return of_default, lambda x: setattr(of_default, "__kwdefaults__", {"of": x})
        case "a global":
            return lambda s, b, h, q, k: s * FACTOR, lambda x: globals().__setitem__("FACTOR", x)
        case "a global tensor":
            return lambda s, b, h, q, k: s * TABLE[h], lambda x: globals().__setitem__("TABLE", torch.full((4,), x))
        case "a global of an inner function":
            return lambda s, b, h, q, k: (lambda t: t * FACTOR)(s), lambda x: globals().__setitem__("FACTOR", x)
        case "a module":
            return lambda s, b, h, q, k: s * SETTINGS.factor, lambda x: setattr(SETTINGS, "factor", x)
        case "an object in an object":
            return lambda s, b, h, q, k: s * settings.inner.factor, lambda x: setattr(settings.inner, "factor", x)
        case "a property":
            return lambda s, b, h, q, k: s * settings.factor, lambda x: setattr(settings.inner, "factor", x)
        case "an operator":
            return lambda s, b, h, q, k: s * settings, lambda x: setattr(settings.inner, "factor", x)
        case "a class":
            return lambda s, b, h, q, k: s * settings.of_class, lambda x: setattr(Settings, "of_class", x)
        case "an object of another library":
            return (
                lambda s, b, h, q, k: s * settings.inner.parts[0],
                lambda x: settings.inner.parts.__setitem__(0, x),
            )
        case "a partial function":
            f = functools.partial(of_default, by=1.0)
            return f, lambda x: f.keywords.__setitem__("by", x)
        case "an attribute of the function":
            f = lambda s, b, h, q, k: s * f.factor  # noqa: E731
            f.factor = 1.0
            return f, lambda x: setattr(f, "factor", x)
        case "a list of parameters":
            parameters = torch.nn.ParameterList([torch.ones(4)])
            return lambda s, b, h, q, k: s * parameters[0][h], lambda x: parameters.__setitem__(
                0, torch.nn.Parameter(torch.full((4,), x))
            )
    raise AssertionError(place)


PLACES = [
    "a number in the closure", "a function in the closure", "a tensor in the closure", "another tensor in the closure",
    "a tensor of another size", "a tensor with other data", "a computed tensor", "a list", "an array",
    "a default argument", "a default tensor", "a keyword argument", "a global", "a global tensor",
    "a global of an inner function", "a module", "an object in an object", "a property", "an operator", "a class",
    "an object of another library", "a partial function", "an attribute of the function", "a list of parameters",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_change_is_seen(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every place that a function reads, also when the same number comes again."""
    query, key, value = (tensor.detach() for tensor in inputs(torch.float32))
    monkeypatch.setattr(f"{__name__}.FACTOR", 1.0)
    monkeypatch.setattr(f"{__name__}.TABLE", torch.ones(4))
    monkeypatch.setattr(Settings, "of_class", 1.0)
    monkeypatch.setattr(SETTINGS, "factor", 1.0, raising=False)
    score_mod, change = _changed_factor(place)
    for factor in (1.0, 1.0, 2.0, 0.5, 0.5, 1.0, 2.0):
        change(factor)
        found = scaledot.scaled_dot_product_attention(query, key, value, score_mod=score_mod)
        torch.testing.assert_close(found, scaledot.scaled_dot_product_attention(query, key, value, scale=factor / 4))


def test_the_same_tensor_twice_is_not_two() -> None:
    def score_mod_of(a: Tensor, b: Tensor) -> Callable[..., Tensor]:
        return lambda s, i, h, q, k: s * a[h] + b[h] * k

    tensors = [tensor.detach() for tensor in inputs(torch.float32)]
    one, two = torch.rand(4), torch.rand(4)
    for a, b in [(one, one), (one, two), (two, one), (one, two), (two, two), (two, one)]:
        found = scaledot.scaled_dot_product_attention(*tensors, score_mod=score_mod_of(a, b))
        wanted = formula(*[tensor.double() for tensor in tensors], score_mod_of(a.double(), b.double()))
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_equal_numbers_that_differ() -> None:
    """1, 1.0 and True; 0.0 and -0.0."""

    def output(number: Any) -> Tensor:
        def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if isinstance(number, bool):
                return s
            return s * 2 if isinstance(number, int) else s + torch.where(k == 0, math.copysign(3.0, number), 0.0)

        return scaledot.scaled_dot_product_attention(*tensors, score_mod=score_mod)

    tensors = [tensor.detach() for tensor in inputs(torch.float32)]
    found = [output(number) for number in (1, True, 0.0, -0.0, 1, True, 0.0, -0.0)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(found[:4], 2))
    assert all(torch.equal(found[k], found[k + 4]) for k in range(4))


def test_traces_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function made anew in each call is traced once, also if two kinds of tensors take turns."""
    traces = []
    real = scaledot._score.arguments.traced
    monkeypatch.setattr("scaledot._score.arguments.traced", lambda *args: traces.append(args) or real(*args))

    def output(table: Tensor, number: float) -> None:
        score_mod = lambda s, b, h, q, k: s + table[h] * number  # noqa: E731
        scaledot.scaled_dot_product_attention(*inputs(torch.float32), score_mod=score_mod)

    for _ in range(3):
        output(torch.rand(4), 1.0)
        output(torch.rand(5), 1.0)
    assert len(traces) == 2


def test_a_trace_keeps_no_tensor_alive() -> None:
    def call() -> weakref.ref[Tensor]:
        table = torch.ones(4)
        scaledot.scaled_dot_product_attention(*inputs(torch.float32), score_mod=lambda s, b, h, q, k: s * table[h])
        return weakref.ref(table)

    alive = call()
    gc.collect()
    assert alive() is None


def test_a_module_takes_one() -> None:
    module, x, gate = scaledot.MultiHeadAttention(16, 4), torch.randn(2, 9, 16), Gate()
    output, _ = module(x, score_mod=gate.score_mod)
    assert torch.equal(output, module(x)[0])
    gate.factor = 2.0
    output, _ = module(x, score_mod=gate.score_mod)
    output.sum().backward()
    assert gate.weight.grad is not None
    assert gate.weight.grad.any()


def test_explain() -> None:
    query, key, value = inputs(torch.float32)
    explanation = scaledot.explain(query, key, value, score_mod=_gated(Captured(torch.float32)))
    assert explanation.forward.kernel != "none"
    assert "it has no score_mod" in str(explanation)


# ------------------------------------------------------------------------------------------------ as options
def _all_options(c: Captured) -> Callable[..., Tensor]:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        far = (k - q).abs() * c.steep[h]
        return torch.tanh(s / 3) * 3 + c.relative[h, (k - q).clamp(-8, 8) + 8] - far

    return score_mod


# The options that a function becomes; None: a program.
BECOMES: dict[str, tuple[Callable[[Captured], Callable[..., Tensor]], set[str] | None]] = {
    "nothing": (lambda c: lambda s, b, h, q, k: s * 1 + 0, set()),
    "a cap": (lambda c: lambda s, b, h, q, k: 2.5 * (s / 2.5).tanh(), {"softcap"}),
    "slopes": (lambda c: lambda s, b, h, q, k: s - c.steep[h] * (q - k).abs(), {"alibi_slopes"}),
    "slopes times minus one": (lambda c: lambda s, b, h, q, k: s + -(q - k).abs() * c.steep[h], {"alibi_slopes"}),
    "slopes of batch entries": (
        lambda c: lambda s, b, h, q, k: s - c.steeps[b, h] * torch.abs(k - q),
        {"alibi_slopes"},
    ),
    "a table": (_relative, {"relative_bias"}),
    "a table with a shift before the ends": (
        lambda c: lambda s, b, h, q, k: c.relative[h, torch.clamp(8 + k - q, 0, 16)] + s,
        {"relative_bias"},
    ),
    "a table of one head": (
        lambda c: lambda s, b, h, q, k: s + c.relative[2, (k - q).clamp(max=8).clamp(min=-8) + 8],
        {"relative_bias"},
    ),
    "all three": (_all_options, {"softcap", "alibi_slopes", "relative_bias"}),
    "two caps": (lambda c: lambda s, b, h, q, k: 2 * torch.tanh(s / 3), None),
    "a cap last": (lambda c: lambda s, b, h, q, k: 2 * torch.tanh((s - c.steep[h] * (q - k).abs()) / 2), None),
    "a cap below zero": (lambda c: lambda s, b, h, q, k: -2 * torch.tanh(s / -2), None),
    "slopes with a sign": (lambda c: lambda s, b, h, q, k: s - c.steep[h] * (q - k), None),
    "slopes upwards": (lambda c: lambda s, b, h, q, k: s + c.steep[h] * (q - k).abs(), None),
    "slopes twice": (lambda c: lambda s, b, h, q, k: s - c.steep[h] * (q - k).abs() * 2, None),
    "slopes for more heads": (lambda c: lambda s, b, h, q, k: s - c.by_key.detach()[h] * (q - k).abs(), None),
    "slopes with a gradient": (lambda c: lambda s, b, h, q, k: s - c.slopes[h] * (q - k).abs(), None),
    "a table backwards": (lambda c: lambda s, b, h, q, k: s + c.relative[h, (q - k).clamp(-8, 8) + 8], None),
    "a narrower table": (lambda c: lambda s, b, h, q, k: s + c.relative[h, (k - q).clamp(-7, 8) + 8], None),
    "a table from the head on": (
        lambda c: lambda s, b, h, q, k: s + c.wide[0, (k - q + 20).clamp(0, 40) + h],
        None,
    ),
    "a table without ends": (lambda c: lambda s, b, h, q, k: s + c.wide[h, k - q + 60], None),
    "a table of rows": (lambda c: lambda s, b, h, q, k: s + c.relative[h, (k - h).clamp(-8, 8) + 8], None),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", BECOMES)
def test_what_options_do_runs_as_options(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    function, options = BECOMES[name]
    captured = Captured(dtype)
    arguments = score_arguments(function(captured), *inputs(dtype), {})
    assert arguments.keys() == options if options is not None else "score_program" in arguments
    monkeypatch.setitem(FUNCTIONS, name, function)
    compared(name, dtype)


@pytest.mark.parametrize("name", ["a cap", "slopes", "a table", "slopes with a gradient"])
def test_options_are_explained(name: str) -> None:
    function, options = BECOMES[name]
    explanation = scaledot.explain(*inputs(torch.float32), score_mod=function(Captured(torch.float32)))
    assert f"it has no {''.join(options or {'score_mod'})}" in str(explanation)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", ["alibi", "relative_bias"])
def test_functions_count_distances_from_the_same_positions(name: str, known: bool) -> None:
    """Whatever the alignment of causal masks is."""
    tensors, captured = [tensor.detach() for tensor in inputs(torch.float32)], Captured(torch.float32)
    table = captured.steep if name == "alibi" else captured.relative.detach()
    score_mod = getattr(scaledot.score_mods, name)(table)
    found = scaledot.scaled_dot_product_attention(
        *tensors,
        score_mod=score_mod if known else lambda *places: score_mod(*places),
        is_causal=True,
        causal_alignment="lower_right",
    )
    i, j = places()
    exact = [tensor.double() for tensor in tensors]
    wanted = formula(*exact, score_mod, j <= i + SHAPE["keys"] - SHAPE["rows"])
    assert (found - wanted).abs().max() < LIMITS[torch.float32]


def test_slopes_of_a_known_function_get_a_gradient() -> None:
    tensors = inputs(torch.float64)
    slopes = torch.rand(4, dtype=torch.float64, requires_grad=True)
    score_mod = scaledot.score_mods.alibi(slopes)
    found = scaledot.scaled_dot_product_attention(*tensors, score_mod=score_mod)
    (right,) = torch.autograd.grad(formula(*tensors, score_mod).sin().sum(), slopes)
    torch.testing.assert_close(torch.autograd.grad(found.sin().sum(), slopes)[0], right)
    with torch.no_grad():  # as an option
        assert "alibi_slopes" in score_arguments(score_mod, *tensors, {})
        torch.testing.assert_close(scaledot.scaled_dot_product_attention(*tensors, score_mod=score_mod), found)


# ------------------------------------------------------------------------------------------------ errors
SMALL, NOTHING = torch.zeros(10), torch.zeros(0)
ERRORS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no function": (3, {}, TypeError, "score_mod: got 3, an int; needs a function"),
    "softcap": (lambda s, b, h, q, k: s, {"softcap": 2.0}, ValueError, "score_mod: got one with softcap; needs one"),
    "an index beyond": (lambda s, b, h, q, k: s + SMALL[k], {}, IndexError, "got the index 1[0-9]* for a dimension"),
    "an index before": (
        lambda s, b, h, q, k: s + SMALL[-k - 5],
        {},
        IndexError,
        "got the index -1[1-9] for a dimension",
    ),
    "an empty tensor": (lambda s, b, h, q, k: s + NOTHING[k], {}, IndexError, "got the index 0 for a dimension"),
    "control flow": (
        lambda s, b, h, q, k: s if q > k else -s,
        {},
        NotImplementedError,
        "needs torch.where in place of",
    ),
    "a value": (lambda s, b, h, q, k: s.item(), {}, NotImplementedError, "needs torch.where in place of"),
    "no index": (lambda s, b, h, q, k: s + SMALL, {}, ValueError, r"result of shape \(10,\); needs one score"),
    "another operation": (
        lambda s, b, h, q, k: torch.lgamma(s),
        {},
        NotImplementedError,
        "got the operation lgamma .*test_score_mod.py.*; needs pointwise",
    ),
    "random numbers": (lambda s, b, h, q, k: s + torch.rand(()), {}, NotImplementedError, "got the operation rand"),
    "no result": (lambda s, b, h, q, k: None, {}, TypeError, "score_mod: got None as its result; needs a score"),
    "complex numbers": (
        lambda s, b, h, q, k: s + SMALL.to(torch.complex64)[h],
        {},
        TypeError,
        "score_mod: got one that computes with torch.complex64; needs real numbers",
    ),
    "a change of a captured tensor": (
        lambda s, b, h, q, k: s + SMALL.add_(1)[h],
        {},
        NotImplementedError,
        "got the operation add_ on a captured tensor; needs a function that changes no tensor",
    ),
    "a change of the score": (lambda s, b, h, q, k: s.add_(1), {}, NotImplementedError, "got the operation add_"),
    "an error of its own": (
        lambda s, b, h, q, k: s.no_such_name,
        {},
        RuntimeError,
        "score_mod: got one that raises AttributeError: .*no_such_name.*; needs a function of",
    ),
    "too few arguments": (lambda s: s, {}, TypeError, "got one that raises TypeError: .*takes 1 .*; needs a function"),
    "a large integer": (
        lambda s, b, h, q, k: s + (k - 2**63),
        {},
        ValueError,
        "score_mod: got the integer 9.223e.18; needs one of 64 bits",
    ),
    "a division by zero": (lambda s, b, h, q, k: s + k // 0, {}, ValueError, "got a division of an integer by 0"),
    "another device": (lambda s, b, h, q, k: s + SMALL.to("meta")[h], {}, ValueError, "needs to be on query's device"),
}


@pytest.mark.parametrize("name", list(ERRORS))
def test_error(name: str) -> None:
    score_mod, options, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        scaledot.scaled_dot_product_attention(*inputs(torch.float32), score_mod=score_mod, **options)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_errors_of_shapes_are_those_of_calls_without_a_function(name: str) -> None:
    for wrong in (torch.tensor(0.5), torch.zeros(3), torch.zeros(3, 4, 37, 16), torch.zeros(2, 3, 37, 16)):
        tensors = dict(zip(("query", "key", "value"), inputs(torch.float32), strict=True)) | {name: wrong}
        errors = []
        for options in ({}, {"score_mod": lambda s, b, h, q, k: s * 2}, {"score_mod": lambda s, b, h, q, k: s * 2}):
            with pytest.raises((ValueError, RuntimeError)) as raised:
                scaledot.scaled_dot_product_attention(**tensors, **options)
            errors.append((raised.type, str(raised.value)))
        assert errors[0] == errors[1] == errors[2]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
def test_integers_wrap_around_as_torchs_do(dtype: torch.dtype) -> None:
    tensors = [tensor.detach() for tensor in inputs(torch.float64)]
    t = (torch.tensor([0, 5, 100, 127]) * (2**24 if dtype == torch.int32 else 1)).to(dtype)
    terms: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda h, k: t[h] - 7, lambda h, k: -t[h], lambda h, k: t[h] * 100, lambda h, k: t[h] + t[k % 4],
        lambda h, k: t[h] << 3, lambda h, k: (t[h] - 9).abs(), lambda h, k: torch.where(k > 3, t[h] - 50, t[h]),
        lambda h, k: t[h].clamp(-2, 100), lambda h, k: (k * 50).to(dtype), lambda h, k: ~t[h],
    ]  # fmt: skip
    for term in terms:
        score_mod = lambda s, b, h, q, k, term=term: s + (term(h, k) % 17).double() / 8  # noqa: E731
        found = scaledot.scaled_dot_product_attention(*tensors, score_mod=score_mod)
        torch.testing.assert_close(found, formula(*tensors, score_mod), rtol=1e-9, atol=1e-9)


def test_integers_divided_by_zero_do_no_harm() -> None:
    tensors, zero = [tensor.detach() for tensor in inputs(torch.float32)], torch.zeros(4, dtype=torch.int64)
    for score_mod in (
        lambda s, b, h, q, k: s + k // zero[h] * 0,
        lambda s, b, h, q, k: s + k % zero[h] * 0,
        lambda s, b, h, q, k: s + torch.fmod(k, q - q) * 0,
        lambda s, b, h, q, k: s + torch.div(zero[h] + -(2**63), k * 0 - 1, rounding_mode="trunc") * 0,
    ):
        scaledot.scaled_dot_product_attention(*tensors, score_mod=score_mod)


def test_an_index_beyond_is_no_error_where_no_key_is_seen() -> None:
    table = torch.randn(40)
    tensors = inputs(torch.float32)
    output = scaledot.scaled_dot_product_attention(
        *tensors, is_causal=True, score_mod=lambda s, b, h, q, k: s + table[q - k]
    )
    assert output.isfinite().all()


def test_there_is_no_second_derivative() -> None:
    query, key, value = inputs(torch.float32)
    output = scaledot.scaled_dot_product_attention(query, key, value, score_mod=lambda s, b, h, q, k: s * 2)
    with pytest.raises(NotImplementedError, match="score_mod: got one in a second derivative"):
        torch.autograd.grad(output.sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match="score_mod: got one in a second derivative or in forward mode"):
        torch.func.jvp(
            lambda q: scaledot.scaled_dot_product_attention(q, key, value, score_mod=lambda s, b, h, q, k: s * 2),
            (query.detach(),),
            (query.detach(),),
        )


def test_a_program_that_no_function_made_is_refused() -> None:
    """Every list of numbers gives an error or a result; none reads outside of its registers or its tensors."""
    query, key, value = (tensor.detach() for tensor in inputs(torch.float32))
    captured = Captured(torch.float32)
    arguments = score_arguments(_mixed(captured), query, key, value, {})
    program = arguments.pop("score_program")
    generator = torch.Generator().manual_seed(5)
    refused = 0
    for _ in range(300):
        wrong = program.clone()
        place = int(torch.randint(0, len(program), (), generator=generator))
        wrong[place] = torch.randint(-2, 70, (), generator=generator)
        try:
            torch.ops.scaledot.sdpa(query, key, value, score_program=wrong, **arguments)
        except (ValueError, IndexError):
            refused += 1
    assert refused > 50
    with pytest.raises(ValueError, match="score_program: got"):
        torch.ops.scaledot.sdpa(query, key, value, score_program=program[:40], **arguments)
