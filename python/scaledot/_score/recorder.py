"""A score function under torch.compile: Dynamo runs it on recorders, and the tape is traced as a function is.

Dynamo cannot trace what :mod:`scaledot._score.trace` does, but it can run a function on objects of ours. Captured
tensors are then inputs of its graph, and what the function computes from them alone is in its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .operations import ALL_GRADIENTS, READS_VALUES

__all__ = ["Tape", "replayed"]

_INPUTS = 5
_OPERATORS = [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "radd",
    "rsub",
    "rmul",
    "rtruediv",
    "rfloordiv",
    "rmod",
    "rpow",
    "neg",
    "abs",
    "invert",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
    "rand",
    "ror",
    "rxor",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "getitem",
]


# Attributes that all 0-d tensors share; what a recorder records is no Python number.
_OF_SCALARS: dict[str, Any] = {
    "ndim": 0,
    "shape": torch.Size(()),
    "dim": lambda: 0,
    "numel": lambda: 1,
    "size": lambda: torch.Size(()),
}
_METHODS = frozenset([name for name in dir(Tensor) if callable(getattr(Tensor, name, None))])


class Tape:
    """The operations of a score function, in order, and the tensors that they read."""

    def __init__(self) -> None:
        self.steps: list[Any] = []  # (name, operands, keyword operands); an operand is (kind, what it is)
        self.tensors: list[Tensor] = []
        self.enabled = False  # whether the call records gradients

    def record(self, score_mod: Callable[..., Any]) -> Any:
        """Runs the function. Returns its result, as an operand."""
        self.enabled = torch.is_grad_enabled()
        inputs = [Recorded(self, number) for number in range(_INPUTS)]
        with _RecordIndices(self):
            return self.operand(score_mod(*inputs))

    def add(self, name: str, args: Sequence[Any], kwargs: Any = None) -> Recorded:
        if self.enabled and not torch.is_grad_enabled():
            raise NotImplementedError(f"score_mod: got torch.no_grad(); needs {ALL_GRADIENTS}")
        operands = tuple([self.operand(a) for a in args])
        named = tuple([(key, self.operand(a)) for key, a in kwargs.items()]) if kwargs else ()
        self.steps.append((name, operands, named))
        return Recorded(self, _INPUTS + len(self.steps) - 1)

    def operand(self, x: Any) -> Any:
        if isinstance(x, Recorded):
            return ("step", x.number)
        if isinstance(x, Attribute):
            return ("attribute", (x.number, x.name))
        if isinstance(x, Tensor):
            for k in range(len(self.tensors)):
                if self.tensors[k] is x:
                    return ("tensor", k)
            self.tensors.append(x)
            return ("tensor", len(self.tensors) - 1)
        if isinstance(x, (tuple, list)):
            return ("tuple", tuple([self.operand(part) for part in x]))
        if isinstance(x, torch.SymFloat):  # item() in torch.export
            raise NotImplementedError(READS_VALUES)
        return ("value", x)


class Recorded:
    """A 0-d tensor that a score function computes, or gets."""

    def __init__(self, tape: Tape, number: int) -> None:
        self.tape = tape
        self.number = number

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for a in [*args, *((kwargs or {}).values())]:
            if isinstance(a, Recorded):
                return a.tape.add(func.__name__, args, kwargs)
        return NotImplemented

    def __bool__(self) -> bool:
        raise NotImplementedError(READS_VALUES)  # without it, the recorder would be true in an `if`

    def __iter__(self) -> Any:
        raise NotImplementedError(READS_VALUES)  # without it, a loop would have no end

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device"):
            return Attribute(self.number, name)
        if name in _OF_SCALARS:
            return _OF_SCALARS[name]
        if name not in _METHODS:
            raise NotImplementedError(f"score_mod: got {name} under torch.compile; needs operations of torch")
        return lambda *args, **kwargs: self.tape.add(name, (self, *args), kwargs)


class Attribute:
    """The dtype or device of a recorder, which is known when the tape is replayed, as in `q_idx.to(score.dtype)`."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name

    def __eq__(self, other: object) -> bool:
        raise NotImplementedError(
            f"score_mod: got a comparison with {self.name} under torch.compile; needs an operation that it is passed to"
        )

    __hash__ = None  # type: ignore[assignment]


class _RecordIndices(TorchFunctionMode):
    """Records captured tensors that are indexed by several recorders, which are hidden in a tuple."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        tensor, index = args
        places = list(index) if isinstance(index, tuple) else [index]
        if not any(isinstance(place, Recorded) for place in places):
            return func(*args)
        for dim in range(len(places) - 1, -1, -1):  # numbers first: the graph computes what depends on them alone
            if isinstance(places[dim], int):
                tensor = tensor.select(dim, places.pop(dim))
        return self.tape.add("__getitem__", (tensor, tuple(places)))


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: self.tape.add(f"__{name}__", (self, *args))


for _name in _OPERATORS:
    setattr(Recorded, f"__{_name}__", _operator(_name))


def replayed(steps: Sequence[Any], result: Any, tensors: Sequence[Tensor]) -> Callable[..., Tensor]:
    """The score function that a tape is of."""

    def score_mod(*inputs: Tensor) -> Any:
        values = list(inputs)

        def value(operand: Any) -> Any:
            kind, x = operand
            if kind == "tuple":
                return tuple(map(value, x))
            if kind == "attribute":
                return getattr(values[x[0]], x[1])
            return values[x] if kind == "step" else tensors[x] if kind == "tensor" else x

        for name, args, kwargs in steps:
            values.append(_function(name)(*map(value, args), **{key: value(x) for key, x in kwargs}))
        return value(result)

    return score_mod


def _function(name: str) -> Callable[..., Any]:
    # torch.where and Tensor.where order their operands differently; the function is what was recorded.
    if name == "getitem":
        return Tensor.__getitem__
    rooms = (Tensor,) if name.startswith("__") else (torch, Tensor, torch.nn.functional, torch.special)
    for room in rooms:
        found = getattr(room, name, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    raise NotImplementedError(f"score_mod: got the operation {name} under torch.compile; needs operations of torch")
