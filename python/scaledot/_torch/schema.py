"""Arguments of an op by the names in its schema.

The dispatcher passes an op's arguments to rules (vmap, DTensor, FLOP formulas) by position, without trailing ones that
have their default. The rules here look arguments up by name, so they do not depend on the order of the schema.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["arguments", "defaults", "given", "names", "tensors_first"]


@functools.cache
def names(op: Any) -> tuple[str, ...]:
    """The names of an op's arguments, in order."""
    return tuple(argument.name for argument in op._schema.arguments)


@functools.cache
def defaults(op: Any) -> Mapping[str, Any]:
    """The defaults of those arguments that have one."""
    return {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}


@functools.cache
def tensors_first(op: Any) -> int:
    """How many tensors, optional ones included, come before the op's first argument of another type."""
    tensors = [str(argument.type) in ("Tensor", "Optional[Tensor]") for argument in op._schema.arguments]
    return tensors.index(False)


def given(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The arguments that a call passes, by name. `args` may be anything with one entry for each of them."""
    return dict(zip(names(op), args, strict=False)) | dict(kwargs or {})


def arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All arguments of a call by name, in the schema's order, with its defaults for those that the call leaves out."""
    known = {**defaults(op), **given(op, args, kwargs)}
    return {name: known[name] for name in names(op) if name in known}
