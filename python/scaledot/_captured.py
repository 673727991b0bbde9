"""What a function captures: the tensors that it may read, and all else that its result may depend on."""

from __future__ import annotations

import dis
import enum
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Capture", "Captured", "is_constant", "names_in"]

# Code of these reads nothing that may change, except what the user gives it.
_LIBRARIES = frozenset(("builtins", "functools", "math", "numpy", "operator", "scaledot", "torch", "types", "typing"))
_Handler = Callable[["Capture", Any], None]


class Capture:
    """The tensors that functions capture, and a state that is another one if anything else that they read is.

    Both are found in closures, default arguments, globals, ``functools.partial``, bound methods, lists, tuples, dicts,
    and in those attributes of objects, classes and modules that code of the functions names.
    """

    __slots__ = ("_names", "_objects", "_seen", "is_known", "state", "tensors")

    def __init__(self, *roots: Any) -> None:
        """`roots`: functions, or other values."""
        self.state: list[Any] = []  # without what the tensors are
        self.tensors: list[Tensor] = []
        self.is_known = True  # False: something cannot be looked into, so `state` may lack it
        self._seen: dict[int, int] = {}
        self._objects: list[Any] = []  # their attributes come last, when all names are known
        self._names: dict[str, None] = {}
        for root in roots:
            self.add(root)
        if self._objects:
            self._add_attributes()

    def add(self, value: Any) -> None:
        """The value and what it refers to, in a fixed order."""
        handler = _HANDLERS.get(type(value), _add_other)
        handler(self, value)

    def is_new(self, value: Any) -> bool:
        """Whether this is the first time that it is met. The state says which values are the same one."""
        size = len(self._seen)
        number = self._seen.setdefault(id(value), size)
        self.state.append(number)
        return number == size

    def name(self, names: Iterable[str]) -> None:
        """Attributes of these names are read."""
        self._names.update(dict.fromkeys(names))

    def look_into(self, owner: Any) -> None:
        """Its attributes are read."""
        self._objects.append(owner)

    def _add_attributes(self) -> None:
        looked: list[int] = []  # of each object, how many names
        while True:
            looked += [0] * (len(self._objects) - len(looked))
            names = list(self._names)
            rest = [k for k, count in enumerate(looked) if count < len(names)]
            if not rest:
                return
            for k in rest:
                for room in _rooms(self._objects[k]):
                    for name in names[looked[k] :]:
                        if name in room:
                            self.state.append(name)
                            self._add_attribute(self._objects[k], room[name])
                looked[k] = len(names)

    def _add_attribute(self, owner: Any, value: Any) -> None:
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.cached_property):
            value = value.func
        elif isinstance(value, types.MemberDescriptorType):  # a slot
            value = getattr(owner, value.__name__, None)
        self.add(value)


class Captured:
    """What functions capture, with the contents of the tensors, as it was when this was made."""

    def __init__(self, *roots: Any) -> None:
        """`roots`: functions, or tensors."""
        capture = Capture(*roots)
        self._alive = capture.tensors  # so that no other tensor gets their ids
        self._state = _state_of(capture)

    def is_current(self, *roots: Any) -> bool:
        """Whether these capture the same, and no tensor was written since."""
        return _state_of(Capture(*roots)) == self._state


def _state_of(capture: Capture) -> list[Any]:
    # Tensors of inference mode count no writes.
    tensors = [(id(t), object() if t.is_inference() else t._version) for t in capture.tensors]
    return [*capture.state, *tensors, True if capture.is_known else object()]


# ------------------------------------------------------------------------------------------------ kinds of values
def _add_tensor(capture: Capture, value: Tensor) -> None:
    if capture.is_new(value):
        capture.tensors.append(value)


def _add_float(capture: Capture, value: float) -> None:
    # 0.0 equals -0.0, and NaN not even itself.
    capture.state += (float, value if value and value == value else repr(value))


def _add_plain(capture: Capture, value: Any) -> None:
    capture.state += (type(value), value)  # the type as well: 1 equals True


def _add_same(capture: Capture, value: Any) -> None:
    capture.state.append(value)


def _add_function(capture: Capture, value: types.FunctionType) -> None:
    if not capture.is_new(value):
        return
    code = value.__code__
    capture.state.append(code)
    for cell in value.__closure__ or ():
        try:
            capture.add(cell.cell_contents)
        except ValueError:  # a name that has no value yet
            capture.state.append(cell)
    for default in value.__defaults__ or ():
        capture.add(default)
    if value.__kwdefaults__:
        capture.add(value.__kwdefaults__)
    if value.__dict__:
        capture.look_into(value)
    of_globals, names = names_in(code)
    if names and not _is_library(value.__module__):
        for name in of_globals:
            if name in value.__globals__:
                capture.state.append(name)
                capture.add(value.__globals__[name])
        capture.name(names)


def _add_method(capture: Capture, value: types.MethodType) -> None:
    capture.add(value.__func__)
    capture.add(value.__self__)


def _add_partial(capture: Capture, value: functools.partial[Any]) -> None:
    for part in (value.func, value.args, value.keywords):
        capture.add(part)


def _add_wrapped(capture: Capture, value: Any) -> None:
    capture.add(value.__func__)


def _add_list(capture: Capture, value: Any) -> None:
    if capture.is_new(value):
        capture.state += (type(value), len(value))
        for part in value:
            capture.add(part)


def _add_dict(capture: Capture, value: Mapping[Any, Any]) -> None:
    if capture.is_new(value):
        capture.state += (type(value), len(value))
        for key, part in value.items():
            capture.add(key)
            capture.add(part)


def _add_set(capture: Capture, value: Any) -> None:
    capture.state += (type(value), frozenset((type(part), part) for part in value))


def _add_module(capture: Capture, value: types.ModuleType) -> None:
    capture.state.append(value)
    if not _is_library(value.__name__) and capture.is_new(value):
        capture.look_into(value)


def _add_type(capture: Capture, value: type) -> None:
    capture.state.append(value)
    if not _is_library(value.__module__) and capture.is_new(value):
        capture.look_into(value)


def _add_other(capture: Capture, value: Any) -> None:
    kind = type(value)
    if issubclass(kind, type):
        _add_type(capture, value)
        return
    known = [_HANDLERS[base] for base in kind.__mro__ if base in _HANDLERS]
    if known:  # a subclass of them
        known[0](capture, value)
        if isinstance(value, Tensor) or issubclass(kind, enum.Enum):
            return
    elif issubclass(kind, _VALUES):
        capture.state += (kind, value)
        return
    elif hasattr(value, "tobytes") and not value.dtype.hasobject:  # NumPy's arrays and numbers
        capture.state += (kind, value.dtype, value.shape, value.tobytes())
        return
    if not capture.is_new(value):
        return
    capture.state.append(kind)
    if not known and not hasattr(value, "__dict__") and not hasattr(kind, "__slots__"):
        capture.is_known = False
        return
    capture.look_into(value)
    capture.add(getattr(value, "__dict__", {}).get("__wrapped__"))
    if isinstance(value, _CONTAINERS):
        capture.add(value._parameters)
        capture.add(value._modules)
    for base in kind.__mro__:
        if not _is_library(base.__module__):
            for name, part in vars(base).items():  # operators, and others that code does not name
                if name.startswith("__") and isinstance(part, types.FunctionType) and name not in _UNREAD:
                    capture.add(part)


_UNREAD = ("__init__", "__new__", "__repr__")  # no operator calls them
_VALUES = (enum.Enum, range, torch.dtype, torch.device, torch.layout, torch.memory_format)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
_HANDLERS: dict[type, _Handler] = {
    Tensor: _add_tensor,
    nn.Parameter: _add_tensor,
    float: _add_float,
    **dict.fromkeys((bool, int, complex, str, bytes, type(None), type(...)), _add_plain),
    **dict.fromkeys((list, tuple), _add_list),
    dict: _add_dict,
    **dict.fromkeys((set, frozenset), _add_set),
    types.FunctionType: _add_function,
    types.MethodType: _add_method,
    functools.partial: _add_partial,
    staticmethod: _add_wrapped,
    classmethod: _add_wrapped,
    types.ModuleType: _add_module,
    type: _add_type,
    **dict.fromkeys(
        (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, torch._ops.OpOverload),
        _add_same,
    ),
}


# ------------------------------------------------------------------------------------------------ names
@lru_cache(1024)
def names_in(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of globals that the code and functions in it read, and all names that they use."""
    found: dict[str, None] = {}
    used = dict.fromkeys(code.co_names)
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found[instruction.argval] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_globals, inner = names_in(constant)
            found.update(dict.fromkeys(inner_globals))
            used.update(dict.fromkeys(inner))
    return tuple(found), tuple(used)


def is_constant(value: Any) -> bool:
    """Whether nothing can change what code reads of it."""
    if type(value) in (types.ModuleType, type):
        return _is_library(value.__module__ if isinstance(value, type) else value.__name__)
    return _HANDLERS.get(type(value)) in (_add_float, _add_plain, _add_same)


@lru_cache(1024)
def _is_library(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _LIBRARIES


def _rooms(owner: Any) -> Iterator[Mapping[str, Any]]:
    """Where its attributes are."""
    if isinstance(owner, type):
        bases = owner.__mro__
    else:
        own = getattr(owner, "__dict__", {})
        yield own
        if isinstance(owner, nn.Module):
            yield from (own.get(room, {}) for room in ("_parameters", "_buffers", "_modules"))
        bases = type(owner).__mro__
    yield from (vars(base) for base in bases if not _is_library(base.__module__))
