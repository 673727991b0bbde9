"""A score program as ATen operators: for programs of torch.export (scaledot._torch.decompositions).

csrc/core/score_program.h says what a program is. A register is a tensor here. It broadcasts to (..., H, Lq, Lk).
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .graph import SPACES
from .program import HEADER, operation_names

__all__ = ["Places", "number", "run_program"]

_INSTRUCTION = 10  # operation, four registers, constant


class Places(NamedTuple):
    """The arguments of a score function after the score."""

    batch: Tensor  # counted over all batch dimensions
    head: Tensor
    row: Tensor
    key: Tensor


def run_program(
    program: Tensor, score: Tensor, places: Places, numbers: Tensor | None, integers: Tensor | None
) -> Tensor:
    """The score that `program` makes of `score`. `numbers`, `integers`: what the function captures."""
    words = _words(program)
    part = words[HEADER : HEADER + words[2]]
    counts, rest = part[:SPACES], part[2 * SPACES :]  # between them: how many registers there are
    result, gradient_count = rest[:2], rest[4]
    first = 2 * SPACES + 5 + 4 * gradient_count
    known: dict[tuple[int, ...], Tensor] = {}
    inputs = {"score": score, **places._asdict(), "batch": torch.remainder(places.batch, words[0])}
    names = operation_names()
    for k in range(sum(counts)):
        word = part[first + _INSTRUCTION * k : first + _INSTRUCTION * (k + 1)]
        operation, to = names[word[0]], tuple(word[1:3])
        operands = [known.get(tuple(word[n : n + 2])) for n in (3, 5, 7)]
        if operation in inputs:
            known[to] = inputs[operation]
        elif operation == "distance":
            known[to] = (places.key - places.row) * word[9]
        elif operation == "constant":
            value = number(struct.unpack("<d", struct.pack("<q", word[9]))[0], score)
            known[to] = value if isinstance(value, Tensor) else _full(value, score)
        elif operation == "int_constant":
            known[to] = torch.full((), word[9], dtype=torch.int64, device=score.device)
        elif operation in ("bound", "float_bound"):
            known[to] = _bound(operands[0], word[9])
        elif operation in ("load", "int_load"):
            known[to] = _loaded(numbers if operation == "load" else integers, operands)
        else:
            found = _RULES[operation](*operands)
            known[to] = found.to(score.dtype) if found.dtype == torch.bool or operation == "to_float" else found
    return known[tuple(result)]


def _full(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device)


def number(value: float, like: Tensor) -> float | Tensor:
    """A number for arithmetic with `like`.

    Torch's exporter to ONNX rounds numbers to float32. Those of a float64 tensor that this changes become sums.
    """
    if like.dtype != torch.float64 or not math.isfinite(value) or abs(value) > torch.finfo(torch.float32).max:
        return value
    if 0.0 < abs(value) < 2.0**-60:  # its parts would be too small for float32
        return number(value * 2.0**100, like) * _full(2.0**-100, like)
    parts: list[float] = []
    while value != 0.0 and len(parts) < 3:
        parts.append(struct.unpack("<f", struct.pack("<f", value))[0])
        value -= parts[-1]
    if len(parts) <= 1:
        return sum(parts)
    return functools.reduce(torch.add, [_full(part, like) for part in parts])


def _bound(index: Any, size: int) -> Tensor:
    """An index of a dimension of `size` numbers, from 0 on. One out of bounds, where the score is masked, becomes 0."""
    index = index.to(torch.int64)
    index = torch.where(index < 0, index + size, index)
    return torch.where((index >= 0) & (index < size), index, 0)


def _loaded(captured: Tensor | None, operands: Sequence[Any]) -> Tensor:
    assert captured is not None
    return captured.flatten()[operands[0] + operands[1]]


def _divided(by: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A division of integers; by 0 it gives 0."""

    def divided(a: Tensor, b: Tensor, _: Any) -> Tensor:
        return torch.where(b == 0, 0, by(a, torch.where(b == 0, 1, b)))

    return divided


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda a, *_: function(a)


def _binary(function: Callable[[Any, Any], Tensor]) -> Callable[..., Tensor]:
    return lambda a, b, *_: function(a, b)


def _select(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition != 0, a, b)


_RULES: dict[str, Callable[..., Tensor]] = {
    "add": _binary(torch.add),
    "subtract": _binary(torch.sub),
    "multiply": _binary(torch.mul),
    "divide": _binary(torch.div),
    "minimum": _binary(torch.minimum),
    "maximum": _binary(torch.maximum),
    "power": _binary(torch.pow),
    "fmod": _binary(torch.fmod),
    "remainder": _binary(torch.remainder),
    "absolute": _unary(torch.abs),
    "exp": _unary(torch.exp),
    "log": _unary(torch.log),
    "log1p": _unary(torch.log1p),
    "expm1": _unary(torch.expm1),
    "sqrt": _unary(torch.sqrt),
    "tanh": _unary(torch.tanh),
    "sigmoid": _unary(torch.sigmoid),
    "erf": _unary(torch.erf),
    "sin": _unary(torch.sin),
    "cos": _unary(torch.cos),
    "floor": _unary(torch.floor),
    "ceil": _unary(torch.ceil),
    "trunc": _unary(torch.trunc),
    "round": _unary(torch.round),
    "sign": _unary(torch.sign),
    "less": _binary(torch.lt),
    "less_equal": _binary(torch.le),
    "equal": _binary(torch.eq),
    "select": _select,
    "to_float": _unary(lambda a: a),
    "to_int": _unary(lambda a: a.to(torch.int64)),
    "int_add": _binary(torch.add),
    "int_subtract": _binary(torch.sub),
    "int_multiply": _binary(torch.mul),
    "int_minimum": _binary(torch.minimum),
    "int_maximum": _binary(torch.maximum),
    "int_floor_divide": _divided(lambda a, b: torch.div(a, b, rounding_mode="floor")),
    "int_truncate_divide": _divided(lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    "int_remainder": _divided(torch.remainder),
    "int_fmod": _divided(torch.fmod),
    "int_and": _binary(torch.bitwise_and),
    "int_or": _binary(torch.bitwise_or),
    "int_xor": _binary(torch.bitwise_xor),
    # Shifts by powers of 2: core ATen has no others.
    "int_shift_left": _binary(lambda a, b: a * torch.pow(2, b)),
    "int_shift_right": _binary(lambda a, b: torch.div(a, torch.pow(2, b), rounding_mode="floor")),
    "int_less": _binary(torch.lt),
    "int_equal": _binary(torch.eq),
    "int_select": _select,
}


def _words(program: Tensor) -> list[int]:
    """The numbers of a program. In torch.export's trace it is a fake tensor, of which the real one is looked up."""
    from torch._subclasses.fake_tensor import FakeTensor  # not with `import scaledot`: it takes long to load

    if isinstance(program, FakeTensor):
        program = _real(program)
    with _disable_current_modes():
        words: list[int] = program.tolist()
    return words


def _real(fake: Any) -> Tensor:
    """The constant of an exported program that a fake tensor stands for.

    Torch keeps no way back. But its converter knows which fake storage it made for which real one.
    """
    try:
        converter = fake.fake_mode.fake_tensor_converter.meta_converter
        fakes, wanted = converter.storage_memo, fake.untyped_storage()._cdata
        for storage, name in converter.describer.lookup_storage.items():
            made = fakes.get(name)
            if made is not None and made._cdata == wanted:
                with _disable_current_modes():
                    return torch.empty(0, dtype=fake.dtype).set_(storage, 0, tuple(fake.shape), (1,))
    except AttributeError:  # another torch
        pass
    raise NotImplementedError(
        f"score_mod: got one whose program torch {torch.__version__} does not give to decompositions; needs a program "
        "that calls scaledot's op, or an attention without it"
    )
