"""What kinds of values the arguments of public functions take, and values of other types that they must refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from bad_arguments import Arguments

_ARRAY = numpy.ones((2, 3))
_MATRIX = torch.ones(2, 3)
_NO_TENSOR = (3, 0.5, True, "x", b"x", _ARRAY, numpy.float32(1), [1.0], (1,), {}, object())
_NO_NUMBER = (
    "0.5", b"0.5", "", [0.5], (1,), {}, 0.5j, True, False, numpy.bool_(True), _ARRAY, numpy.ones(1), _MATRIX,
    torch.ones(1), torch.tensor(True), torch.tensor(0.5j), torch.tensor(0.5, requires_grad=True),
    torch.tensor(0.5, device="meta"), object(), float,
)  # fmt: skip
_NO_INTEGER = (
    "3", b"3", [3], (3,), {}, 3.0, 1.5, 3j, True, False, numpy.bool_(True), numpy.float64(3), _ARRAY, _MATRIX.long(),
    torch.tensor([3]), torch.tensor(3.0), torch.tensor(True), torch.tensor(3, device="meta"), object(), int,
)  # fmt: skip
_NO_FLAG = (0, 1, 1.0, "yes", "", [], [True], numpy.bool_(True), torch.tensor(True), torch.ones(2) > 0, object())
_NO_TEXT = (3, 0.5, True, b"upper_left", ["upper_left"], ("ring", 3), _ARRAY, _MATRIX, "sideways", "", "x" * 999)
_NO_PAIR = (
    3, 0.5, True, "ab", b"ab", (1,), (1, 2, 3), [], {1: 2, 3: 4}, {1, 2}, _ARRAY, numpy.ones(2), _MATRIX,
    torch.tensor([1, 2]), (1.5, 0), (0, 1.0), ("1", 0), (True, 0), (0, False), (numpy.bool_(True), 0), ((1,), 0),
    (torch.tensor(1.0), 0), (torch.tensor([1]), 0), (0, object()),
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """Values of wrong types, and other spellings of a right value."""

    wrong: tuple[Any, ...]
    spellings: Callable[[Any], tuple[Any, ...]] = lambda value: ()


def _numbers(value: Any) -> tuple[Any, ...]:
    spelled = (numpy.float32(value), numpy.float64(value), torch.tensor(float(value)), torch.tensor(value).double())
    return (*spelled, torch.tensor(value).bfloat16()) if value is not None else ()


def _integers(value: Any) -> tuple[Any, ...]:
    return (
        ()
        if value is None
        else (numpy.int64(value), numpy.uint8(value), torch.tensor(value), torch.tensor(value).int())
    )


def _pairs(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    spelled = [[None if side is None else to(side) for side in value] for to in (numpy.int32, torch.tensor)]
    return (list(value), *spelled)


TENSOR = Kind((None, *_NO_TENSOR))
OPTIONAL_TENSOR = Kind(_NO_TENSOR)
NUMBER = Kind((None, *_NO_NUMBER), _numbers)
OPTIONAL_NUMBER = Kind(_NO_NUMBER, _numbers)
INTEGER = Kind((None, *_NO_INTEGER), _integers)
OPTIONAL_INTEGER = Kind(_NO_INTEGER, _integers)
FLAG = Kind((None, *_NO_FLAG))
TEXT = Kind((None, *_NO_TEXT))
WINDOW = Kind(_NO_PAIR, _pairs)
WINDOW_SIZE = Kind((None, (None, 0), *_NO_PAIR), _pairs)  # -1 for no limit
DEVICE = Kind((0.5, True, "nowhere", "", b"cpu", ["cpu"], {}, _MATRIX, object()))
DTYPE = Kind(("float32", float, 3, numpy.float32, numpy.dtype("float32"), torch.int64, torch.bool, torch.complex64))
LENGTHS = Kind((None, 0.5, True, "12", b"12", [1.5], ["1"], [[1, 2]], [None], {}, _ARRAY, _MATRIX, object()))
MODULE = Kind((None, 3, "Linear", torch.nn.MultiheadAttention, [torch.nn.Linear(1, 1)], _MATRIX, object()))
MESH = Kind((None, 3, "cpu", (1,), _MATRIX, object()))
BLOCK_MASK = Kind((3, 0.5, True, "x", [1], {}, _ARRAY, _MATRIX, object()))
AUX = Kind((1, True, "lse", {"lse": True}, [True], object()))
COUNT = Kind(INTEGER.wrong)  # or a tensor with a number for each sequence
EACH = Kind((None, 3, 0.5, True, "12", [1.5], ["1"], [[1, 2]], [None], _ARRAY, _MATRIX, object()))  # of its elements
FUNCTION = Kind((0.1, 1, True, "relu", _MATRIX, [torch.relu], {}))
ANY = Kind(())  # what torch's own class or function does with it


@dataclass(frozen=True)
class Call:
    """A function, arguments with which it works, and the kind of each argument that it has."""

    function: Callable[..., Any]
    arguments: Callable[[], Arguments]
    kinds: Mapping[str, Kind]

    def with_(self, **changes: Any) -> Any:
        torch.manual_seed(0)
        return self.function(**self.arguments() | changes)


def kinds(**names: str) -> dict[str, Kind]:
    """{argument: kind} from kinds="names separated by blanks"."""
    every = {name.lower(): kind for name, kind in globals().items() if isinstance(kind, Kind)}
    return {argument: every[kind] for kind, listed in names.items() for argument in listed.split()}
