"""score_mod: what a function captures may change between calls, and traces are kept."""

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

import scaledot
from score_mod_cases import formula, inputs


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
    module, x, gate = scaledot.MultiHeadAttention(16, 4), torch.randn(2, 40, 16), Gate()  # one kernel takes both
    output, _ = module(x, score_mod=gate.score_mod)
    assert torch.equal(output, module(x)[0])
    gate.factor = 2.0
    output, _ = module(x, score_mod=gate.score_mod)
    output.sum().backward()
    assert gate.weight.grad is not None
    assert gate.weight.grad.any()
