"""Captured: whether what a function's result depends on, besides its arguments, has changed."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor

__all__ = ["Captured", "captured_values"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Captured:
    """The tensors and plain values that a function captures, as they were when this was made.

    They are found in closures, default arguments, globals that the function names, ``functools.partial``, the object of
    a bound method, attributes of objects, and lists, tuples and dicts of these.
    """

    def __init__(self, *roots: Any) -> None:
        """`roots`: functions, or tensors."""
        self._values = list(_captures(roots, set()))  # alive, so that no other object gets their ids
        self._state = [_state(value) for value in self._values[1:]]

    def is_current(self, *roots: Any) -> bool:
        """Whether these capture the same objects, and no tensor was written since."""
        return [_state(value) for value in list(_captures(roots, set()))[1:]] == self._state


def captured_values(function: Any) -> list[Any]:
    """The function and what it captures, in a fixed order. Objects of other kinds have their attributes after them."""
    return list(_captures(function, set()))


def _state(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (id(value), object() if value.is_inference() else value._version)  # inference tensors count no writes
    return value if isinstance(value, _PLAIN) else id(value)


def _captures(value: Any, seen: set[int]) -> Iterator[Any]:
    """The value and what it refers to, in a fixed order."""
    if isinstance(value, (Tensor, *_PLAIN)):
        yield value
        return
    if id(value) in seen or isinstance(value, (types.ModuleType, type)):
        return
    seen.add(id(value))
    yield value
    for part in _parts(value):
        yield from _captures(part, seen)


def _names(code: types.CodeType) -> Iterator[str]:
    """The global names, and those of attributes, that the code and functions in it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # a name that has no value yet
                yield None
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        yield from (value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__)
    elif isinstance(value, types.MethodType):
        yield value.__func__
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield value.func
        yield from value.args
        yield from value.keywords.values()
    elif isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif hasattr(value, "__dict__"):
        yield vars(type(value)).get("__call__")
        for attribute in vars(value).values():  # not the objects in it: a model is large
            if isinstance(attribute, (list, tuple, dict)):
                inside = attribute.values() if isinstance(attribute, dict) else attribute
            else:
                inside = (attribute,)
            yield from (part for part in inside if isinstance(part, (Tensor, *_PLAIN)))
