"""Errors for arguments of a wrong Python type: `query: got a numpy.ndarray of shape (2, 8); needs a torch.Tensor`.

Each is one line that names the argument, and never prints the elements of an array.
"""

from __future__ import annotations

import numbers
import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy

from ._keywords import MISSING
from ._namespace import NAMESPACE

__all__ = [
    "as_integer",
    "check_device",
    "check_dtype",
    "check_layout",
    "check_types",
    "described",
    "flag",
    "integer",
    "number",
    "one_of",
    "require_dense",
    "require_tensors",
    "tensor_error",
]

# How torch says that an op does not take an argument of this type. The lines below it print the value and the schema.
_REFUSAL = re.compile(rf"{NAMESPACE}::\w+\(\) Expected a value of type '(?P<type>.+?)' for argument '(?P<name>\w+)'")
_WORDS = {
    "bool": "True or False",
    "float": "a number",
    "int": "an integer",
}
_PRINTED = (bool, int, float, complex, str)
_LONGEST = 40  # characters of a value that is printed


def described(value: object) -> str:
    """A description of an argument, for the part of an error after "got"."""
    kind = _kind(value)
    if value is None or value is MISSING:
        return repr(value)
    if isinstance(value, Tensor) and value.is_nested:
        return "a nested tensor"  # whose shape torch may not know
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and (shape or isinstance(value, Tensor)):
        return f"{kind} of shape {tuple(shape)}"
    if type(value) is int and value.bit_length() > 63:
        return f"{kind} of {value.bit_length()} bits"
    if isinstance(value, _PRINTED) and len(text := repr(value)) <= _LONGEST:
        return f"{text}, {kind}"
    if isinstance(value, (tuple, list)) and len(value) <= _LONGEST:
        plain = all(element is None or isinstance(element, _PRINTED) for element in value)
        return text if plain and len(text := repr(value)) <= _LONGEST else kind
    return kind


def _kind(value: object) -> str:
    """The type with its article: "a list", "an int", "a numpy.ndarray"."""
    name = type(value).__qualname__
    module = type(value).__module__.split(".")[0]
    if module not in ("builtins", "__main__"):
        name = f"{module}.{name}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def tensor_error(name: str, value: object) -> TypeError:
    """The error for an argument that should be a tensor, with the call that makes one of it."""
    got, how = described(value), ""
    if isinstance(value, (list, tuple)):
        got = _kind(value)
        if not any(isinstance(element, Tensor) for element in value):
            how = f": torch.tensor({name})"
    elif _kind(value) == "a numpy.ndarray":
        how = f": torch.from_numpy({name})"
    elif isinstance(value, Proxy):  # which answers hasattr with another proxy
        how = "; torch.fx records MultiHeadAttention and scaled_dot_product_attention, and others after torch.fx.wrap"
    elif hasattr(value, "__dlpack__"):
        how = f": torch.from_dlpack({name})"
    return TypeError(f"{name}: got {got}; needs a torch.Tensor{how}")


def require_tensors(**arguments: object) -> None:
    """Raises a TypeError for an argument that is not a tensor."""
    for name, argument in arguments.items():
        if not isinstance(argument, Tensor):
            raise tensor_error(name, argument)


def check_layout(name: str, tensor: Tensor, *layouts: torch.layout) -> None:
    """Raises an error for a sparse tensor, for example. `layouts`: those that are allowed as well as torch.strided."""
    if tensor.layout not in (torch.strided, *layouts):
        raise TypeError(f"{name}: got a tensor of layout {tensor.layout}; needs a dense one (to_dense())")


def require_dense(**arguments: object) -> None:
    """Raises an error for an argument that is no dense tensor on the device of the first."""
    first = ""
    for name, argument in arguments.items():
        if not isinstance(argument, Tensor):
            raise tensor_error(name, argument)
        if argument.is_nested:
            raise TypeError(f"{name}: got a nested tensor; needs a dense one")
        check_layout(name, argument)
        if not first:
            first, device = name, argument.device
        if argument.device != device:
            raise ValueError(f"{name}: got a tensor on {argument.device}; needs {device}, as {first}")


def flag(name: str, value: Any) -> Any:
    """`value` if it is a bool. As in torch, other types are a TypeError: 1, a numpy.bool, a tensor."""
    if isinstance(value, (bool, torch.SymBool)):
        return value
    raise TypeError(f"{name}: got {described(value)}; needs True or False")


def number(name: str, value: Any, *, optional: bool = False) -> Any:
    """`value` as a Python number. As torch does, it takes a NumPy scalar and a tensor without dimensions.

    A bool is refused: it stands where a number belongs only by mistake. So is a tensor that requires grad, because it
    would get none.
    """
    if type(value) is float or type(value) is int or (optional and value is None):
        return value
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value
    if isinstance(value, Tensor):
        if _is_scalar(value) and not value.dtype.is_complex:
            return value.item()
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, int) else float(value)
    raise TypeError(f"{name}: got {_described_scalar(value)}; needs a number{', or None' if optional else ''}")


def integer(name: str, value: Any, *, optional: bool = False, least: int | None = None) -> Any:
    """`value` as a Python integer, taken as :func:`number` takes it. One below `least` is a ValueError."""
    if optional and value is None:
        return None
    found = value if type(value) is int else as_integer(value)
    if found is None:
        raise TypeError(f"{name}: got {_described_scalar(value)}; needs an integer{', or None' if optional else ''}")
    if least is not None and found < least:
        raise ValueError(f"{name}: got {found}; needs at least {least}")
    return found


def as_integer(value: Any) -> Any:
    """`value` as a Python integer, or None if it is none."""
    if isinstance(value, torch.SymInt):
        return value
    if isinstance(value, Tensor):
        integral = not (value.dtype.is_floating_point or value.dtype.is_complex)
        return value.item() if _is_scalar(value) and integral else None
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _is_scalar(tensor: Tensor) -> bool:
    """Whether the tensor can stand for a number."""
    known = tensor.layout == torch.strided and not tensor.is_meta
    return known and tensor.dim() == 0 and tensor.dtype != torch.bool and not tensor.requires_grad


def _described_scalar(value: object) -> str:
    if not isinstance(value, Tensor) or value.dim() > 0:
        return described(value)
    requires_grad = " that requires grad" if value.requires_grad else ""
    return f"{described(value)}, {value.dtype} on {value.device.type}{requires_grad}"


def one_of(name: str, value: Any, *choices: str) -> Any:
    """`value` if it is one of these texts. Another text is a ValueError, any other type a TypeError."""
    if isinstance(value, str) and value in choices:
        return value
    texts = [f'"{choice}"' for choice in choices]
    needs = f"{', '.join(texts[:-1])} or {texts[-1]}"
    if isinstance(value, str):
        raise ValueError(f"{name}: got {value!r:.60}; needs {needs}")
    raise TypeError(f"{name}: got {described(value)}; needs {needs}")


def check_device(name: str, value: Any) -> None:
    """Raises an error unless torch makes a device of `value`, or it is None."""
    if value is None or isinstance(value, torch.device):
        return
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise TypeError(f"{name}: got {described(value)}; needs a torch.device, or what names one, such as 'cpu'")
    try:
        torch.device(value)
    except RuntimeError:
        raise ValueError(f"{name}: got {described(value)}; needs the name of a device, such as 'cpu'") from None


def check_dtype(name: str, value: Any) -> None:
    """Raises an error unless `value` is a real floating dtype of torch, or None."""
    if value is None or (isinstance(value, torch.dtype) and value.is_floating_point):
        return
    got = str(value) if isinstance(value, torch.dtype) else described(value)
    raise TypeError(f"{name}: got {got}; needs a floating dtype such as torch.float32, or None")


def check_types(error: RuntimeError, arguments: Mapping[str, Any]) -> None:
    """Raises a better error if `error` is torch's for an op's argument of a wrong type; does nothing otherwise.

    It is called after the op has failed, so that a call that works pays nothing for it.

    Args:
        error: what the op raised.
        arguments: those of the op that users pass, by name.
    """
    found = _REFUSAL.match(str(error))
    if found is None or found["name"] not in arguments:
        return
    name, value = found["name"], arguments[found["name"]]
    of = re.fullmatch(r"Optional\[(.+)\]", found["type"])
    type_name = of[1] if of else found["type"]
    if type_name == "Tensor":
        raise tensor_error(name, value) from None
    side = re.fullmatch(r"window_(left|right)", name)  # a window is two arguments of the op
    got = f"a {side[1]} side of {described(value)}" if side else described(value)
    needs = _WORDS.get(type_name, type_name)
    large = isinstance(value, int) and type_name in ("int", "float")  # the type is right
    needs += " of 64 bits" if large else ""
    needs += ", or None" if of and name != "masked_score" else ""  # whose default is None in the op only
    kind = ValueError if large else TypeError
    raise kind(f"{'window' if side else name}: got {got}; needs {needs}") from None
