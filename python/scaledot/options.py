"""The keyword options of attention, declared once.

The signatures of scaled_dot_product_attention, explain, varlen_attention, explain_varlen and
context_parallel_attention, the check for unknown keywords, and the arguments of the ops all follow from the classes
below. An option that the ops take under the same name needs one line here and one in the docstring of
scaled_dot_product_attention. In `Options` it reaches all five functions, in a subclass those that use the subclass.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict, TypeVar, get_args, get_origin, get_type_hints

from torch import Tensor

from ._checks import as_integer, described, flag, integer, number, one_of
from ._keywords import require_arguments, unknown_keyword
from ._score import ScoreMod
from .block_mask import BlockMask, block_arguments

__all__ = ["Alignment", "Options", "SdpaOptions", "VarlenOptions", "Window"]

Window = tuple[int | None, int | None]
Alignment = Literal["upper_left", "lower_right"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Default:
    """The default of an option, written next to its type."""

    value: Any


# -------------------------------------------------------------------------------------------------- declarations
class Options(TypedDict, total=False):
    """Options of every attention function."""

    causal_alignment: Annotated[Alignment, Default("upper_left")]
    window: Annotated[Window | None, Default(None)]
    softcap: Annotated[float | None, Default(None)]
    alibi_slopes: Annotated[Tensor | None, Default(None)]
    relative_bias: Annotated[Tensor | None, Default(None)]


class SdpaOptions(Options, total=False):
    """Options of scaled_dot_product_attention and explain."""

    masked_score: Annotated[float, Default(-math.inf)]
    # A scaledot.BlockMask, or a torch.nn.attention.flex_attention.BlockMask, which takes long to import.
    block_mask: Annotated[BlockMask | Any | None, Default(None)]
    score_mod: Annotated[ScoreMod | None, Default(None)]
    key_indices: Annotated[Tensor | None, Default(None)]
    out: Annotated[Tensor | None, Default(None)]


class _TorchVarlenOptions(TypedDict, total=False):
    """Keyword arguments of torch.nn.attention.varlen.varlen_attn, and dropout_p."""

    scale: Annotated[float | None, Default(None)]
    window_size: Annotated[tuple[int, int], Default((-1, -1))]
    enable_gqa: Annotated[bool, Default(False)]
    seqused_k: Annotated[Tensor | None, Default(None)]
    block_table: Annotated[Tensor | None, Default(None)]
    num_splits: Annotated[int | None, Default(None)]
    dropout_p: Annotated[float, Default(0.0)]


class VarlenOptions(_TorchVarlenOptions, Options, total=False):
    """Options of varlen_attention and explain_varlen."""

    k_scale: Annotated[Tensor | None, Default(None)]
    v_scale: Annotated[Tensor | None, Default(None)]
    attn_mask: Annotated[Tensor | None, Default(None)]
    out: Annotated[Tensor | None, Default(None)]


def as_constant(number: Any) -> Any:
    """`number`, with 0 for 0.0.

    With dynamic=True, torch.compile makes a graph input of a float that is no literal of the traced code, such as a
    default or an attribute. It finds later that no kernel reads it, and traces everything again. An int of 0 is a
    constant from the start.
    """
    return 0 if type(number) is float and number == 0.0 else number


class OptionSet:
    """The options that some functions take as ``**options``, with their types and defaults."""

    def __init__(self, options: type, **defaults: object) -> None:
        """`options`: a class from above; `defaults`: where these functions differ from it."""
        self.functions: dict[str, Callable[..., Any]] = {}  # those that take them, by name
        self.types: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        for name, hint in get_type_hints(options, include_extras=True).items():
            (default,) = (extra for extra in hint.__metadata__ if isinstance(extra, Default))
            self.types[name] = hint.__origin__
            self.defaults[name] = defaults.get(name, default.value)
        # The options that Python checks. Numbers: whether each may be None. The ops check the types of the others.
        self.numbers = self._of_type(float)
        self.integers = self._of_type(int)
        self.texts = {name: get_args(hint) for name, hint in self.types.items() if get_origin(hint) is Literal}
        # Values that calls compare with. torch 2.11 compiles all values of a dict that the traced code looks into.
        self.compared = {name: as_constant(default) for name, default in self.defaults.items()}

    def _of_type(self, wanted: type) -> dict[str, bool]:
        found = {}
        for name, hint in self.types.items():
            if hint in (wanted, wanted | None):
                found[name] = hint is not wanted
        return found

    def sign(self, function: _Function) -> _Function:
        """Decorator of a function that takes ``**options``: its signature then lists every option.

        inspect.signature, help() and Sphinx read the signature. Calls are not wrapped, so they cost nothing more. The
        defaults of positional arguments go through `as_constant`; the signature shows them as they are written.
        """
        types = get_type_hints(function)
        signature = inspect.signature(function)
        listed = []
        for parameter in signature.parameters.values():
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                listed.append(parameter.replace(annotation=types[parameter.name]))
        positional = [p for p in listed if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=self.defaults[name], annotation=hint)
            for name, hint in self.types.items()
        ]
        signature = inspect.Signature(
            [*positional, *options, *listed[len(positional) :]], return_annotation=types["return"]
        )
        function.__defaults__ = tuple(map(as_constant, function.__defaults__ or ()))  # type: ignore[attr-defined]
        require_arguments(function)
        function.__signature__ = signature  # type: ignore[attr-defined]
        self.functions[function.__name__] = function
        return function


SHARED = OptionSet(Options)
SDPA = OptionSet(SdpaOptions)
VARLEN = OptionSet(VarlenOptions, causal_alignment="lower_right")  # torch's varlen_attn aligns this way


# ------------------------------------------------------------------------------------------------ from options to ops
def op_arguments(function: str, options: Mapping[str, object], known: OptionSet) -> dict[str, Any]:
    """The ops' keyword arguments for a function's ``**options``. Options at their default are left out.

    Raises:
        TypeError: an option that the function does not have; a `window` that is not a pair; a `block_mask` that is
            none; another option of a wrong type, except tensors, which the ops check.
    """
    defaults = known.compared
    arguments: dict[str, Any] = {}
    for name, value in options.items():
        if name == "_output_strides":  # not an option of users: see dropin/_strides.py
            arguments["output_strides"] = value
            continue
        if name not in defaults:
            raise unknown_keyword(known.functions[function], name)
        if value is defaults[name]:
            continue
        if name == "window":
            arguments["window_left"], arguments["window_right"] = window_sides(value)
        elif name == "block_mask":
            arguments.update(block_arguments(value))
        elif name == "masked_score":
            if value is None:
                raise TypeError("masked_score: got None; needs a number (-math.inf hides a masked key entirely)")
            value = number(name, value)
            if not (isinstance(value, float) and value == -math.inf):  # which a schema cannot spell: it has None
                arguments[name] = value
        elif name in known.numbers:
            arguments[name] = number(name, value, optional=known.numbers[name])
        elif name in known.texts:
            arguments[name] = one_of(name, value, *known.texts[name])
        elif name in known.integers:
            arguments[name] = integer(name, value, optional=known.integers[name])
        else:
            arguments[name] = flag(name, value) if known.types[name] is bool else value
    return arguments


def window_sides(window: object) -> tuple[int | None, int | None]:
    """The two sides of a `window` argument, None for a side without a limit.

    The ops check the range of the numbers.

    Raises:
        TypeError: `window` is not a pair of integers and Nones.
    """
    if type(window) is tuple and len(window) == 2 and type(window[0]) is type(window[1]) is int:
        return window  # the usual case, fast
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        needs = "a pair (left, right) of integers, None for a side without a limit"
        raise TypeError(f"window: got {described(window)}; needs {needs}")
    sides = [side if side is None else as_integer(side) for side in window]
    for name, side, found in zip(("left", "right"), window, sides, strict=True):
        if found is None and side is not None:
            raise TypeError(f"window: got a {name} side of {described(side)}; needs an integer, or None")
    return sides[0], sides[1]
