"""From a score function, as FlexAttention takes it, to the arguments of the ops.

A function is traced once for each kind of what it captures: the dtypes and shapes of its tensors, and the values of
all else that it reads. The program reads the tensors' numbers in each call, so they may change between calls, and so
may the tensors themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch._C._functorch import is_batchedtensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from .._captured import Capture, is_constant, names_in
from .._checks import described
from .._torch.dtensor import any_dtensor
from .graph import SMALL
from .options import OPTIONS, known_options, option_arguments, usable
from .recorder import Tape, replayed
from .trace import ScoreMod, Traced, traced

__all__ = ["score_arguments"]

_KEPT = 256  # traced functions
_NONE: frozenset[int] = frozenset()
_OPTIONS = frozenset(OPTIONS)
_ABSENT = ...  # in place of a global that does not exist
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Mode = tuple[bool, bool]  # query is float64; no position is above SMALL


def score_arguments(
    score_mod: Any, query: Tensor, key: Tensor, value: Tensor, others: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of the ops that say what `score_mod` does. `others`: the arguments so far.

    Raises:
        TypeError: `score_mod` is not a function.
        ValueError: `others` change scores too.
        NotImplementedError: it does what no score program can; the message names the operation.
    """
    if type(score_mod) is FunctionType and not is_dynamo_compiling() and _OPTIONS.isdisjoint(others):
        last = _last.get(id(score_mod.__code__))
        arguments = None if last is None else last.arguments(score_mod, query, key, value, others)
        if arguments is not None:
            return arguments
    if not callable(score_mod):
        raise TypeError(f"score_mod: got {described(score_mod)}; needs a function of (score, b, h, q_idx, kv_idx)")
    for name in OPTIONS:
        if others.get(name) is not None:
            raise ValueError(
                f"score_mod: got one with {name}; needs one of them "
                f"(scaledot.score_mods.{name.removesuffix('_slopes')} is a score function, and "
                "scaledot.score_mods.compose joins it with others)"
            )
    options = known_options(score_mod)
    if options is not None:
        arguments = usable(options, others)
        if arguments is not None:
            return arguments
    if not (type(query) is type(key) is type(value) is Tensor) and any_dtensor(query, key, value):
        raise NotImplementedError("score_mod: got DTensors; needs local tensors (to_local())")
    batches = _batches(query, key, value)
    small = max((batches, *query.shape[-3:-1], *key.shape[-2:-1])) <= SMALL
    mode = (query.dtype == torch.float64, small)
    if is_dynamo_compiling():
        return _compiled_arguments(score_mod, query, batches, mode, others)
    capture = Capture(score_mod)
    if any_dtensor(*capture.tensors):
        raise NotImplementedError("score_mod: got a captured DTensor; needs a local tensor (to_local())")
    if any(type(tensor) not in (Tensor, Parameter) for tensor in capture.tensors):
        return _compiled_arguments(score_mod, query, batches, mode, others)  # torch.export's, for example
    if any(map(is_batchedtensor, capture.tensors)):
        raise NotImplementedError(
            "score_mod: got a captured tensor with a dimension of torch.vmap; needs one that all samples share"
        )
    found = _found(score_mod, capture, mode)
    tensors = found.tensors if found.sources is None else [capture.tensors[k] for k in found.sources]
    for tensor in tensors:
        if tensor.device != query.device:
            raise ValueError(
                f"score_mod: got a captured tensor on {tensor.device}; needs it on query's device, {query.device}"
            )
    return _call_arguments(found, capture.tensors, query, batches, others)


def _batches(*inputs: Tensor) -> int:
    """The number of batch entries. 1 if the inputs do not fit together: the op says why."""
    first, *others = [tensor.shape[:-3] for tensor in inputs]
    if all(shape == first for shape in others):
        return max(math.prod(first), 1)
    try:
        return max(math.prod(torch.broadcast_shapes(first, *others)), 1)
    except RuntimeError:
        return 1


def _found(score_mod: ScoreMod, capture: Capture, mode: _Mode) -> Traced:
    """The trace of a function of this kind, made if there is none."""
    kind = (*mode, *capture.state, *[(tensor.dtype, tensor.shape) for tensor in capture.tensors])
    found = _traced.get(kind) if capture.is_known else None
    if found is None:
        found = traced(score_mod, capture.tensors, *mode)
        if found.sources is None or not capture.is_known:
            return found
        for kept in (_traced, _last):
            if len(kept) >= _KEPT:
                kept.clear()
        _traced[kind] = found
    last = _Last.of(score_mod, mode, found)
    if last is not None:
        _last[id(last.code)] = last
    return found


class _Last(NamedTuple):
    """The last call of a function that captures tensors and values that nothing can change, and no other objects.

    Most do. Whether a call captures the same takes less time to say than what it captures.
    """

    code: CodeType  # alive, so that no other gets its id
    double: bool
    names: tuple[str, ...]  # of globals
    values: list[Any]  # (dtype, shape) in place of a tensor
    traced: Traced

    @staticmethod
    def of(score_mod: Any, mode: _Mode, traced: Traced) -> _Last | None:
        """None: the function captures others, or positions are large."""
        double, small = mode
        if type(score_mod) is not FunctionType or not small:
            return None
        names, _ = names_in(score_mod.__code__)
        try:
            values = _captured_by(score_mod, names)
        except ValueError:
            return None
        tensors = [v for v in values if type(v) in (Tensor, Parameter)]
        constants = [v for v in values if is_constant(v)]
        if score_mod.__kwdefaults__ or len(tensors) + len(constants) < len(values) or not _all_differ(tensors):
            return None
        kinds = [(v.dtype, v.shape) if isinstance(v, Tensor) else v for v in values]
        return _Last(score_mod.__code__, double, names, kinds, traced)

    def arguments(
        self, score_mod: Any, query: Tensor, key: Tensor, value: Tensor, others: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """The arguments of the ops, for inputs of 4 dimensions on a CPU. None: the call is of another kind."""
        if not (type(query) is type(key) is type(value) is Tensor):
            return None
        try:
            batches, heads, rows, _ = query.shape
            of_key, _, keys, _ = key.shape
            of_value = value.shape[0]
            values = _captured_by(score_mod, self.names)
        except (ValueError, IndexError):  # other dimensions, or a name in the closure that has no value yet
            return None
        if not (batches == of_key == of_value and batches <= SMALL and heads <= SMALL and rows <= SMALL):
            return None
        if keys > SMALL or (query.dtype is torch.float64) is not self.double or score_mod.__kwdefaults__:
            return None
        if not values and not self.values and self.traced.options is None:
            return {"score_program": self.traced.program(batches or 1, _NONE)}
        if len(values) != len(self.values) or not query.is_cpu or _are_functorch_transforms_active():
            return None
        tensors = []
        for one, kind in zip(values, self.values):  # noqa: B905  # strict takes time
            if one is not kind:
                if type(one) is not Tensor and type(one) is not Parameter:
                    return None
                if type(kind) is not tuple or one.dtype is not kind[0] or one.shape != kind[1] or not one.is_cpu:
                    return None
                tensors.append(one)
        if len(tensors) > 1 and not _all_differ(tensors):
            return None
        traced = self.traced
        if traced.is_one_table and not tensors[0].requires_grad:  # the usual case, fast
            numbers = _converted(tensors[0], torch.float64 if self.double else torch.float32)
            return {"score_program": traced.program(batches or 1, _NONE), "score_numbers": numbers}
        return _call_arguments(traced, tensors, query, batches or 1, others)


_traced: dict[tuple[Any, ...], Traced] = {}
_last: dict[int, _Last] = {}  # by the id of their code


def _all_differ(tensors: Sequence[Tensor]) -> bool:
    return len(set(map(id, tensors))) == len(tensors)


def _captured_by(score_mod: FunctionType, names: Sequence[str]) -> list[Any]:
    """What is in the function's closure, its default arguments, and globals of these names.

    Raises:
        ValueError: a name in the closure has no value yet.
    """
    closure, defaults = score_mod.__closure__, score_mod.__defaults__
    values = [cell.cell_contents for cell in closure] if closure else []
    if defaults:
        values += defaults
    if names:
        get = score_mod.__globals__.get
        for name in names:
            values.append(get(name, _ABSENT))
    return values


def _call_arguments(
    traced: Traced, tensors: Sequence[Tensor], query: Tensor, batches: int, others: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of the ops. `tensors`: those that the function captures."""
    if traced.sources is None:
        tables: Sequence[Tensor] = traced.tensors
    else:
        tables = [tensors[k] for k in traced.sources]
    if traced.prologue is not None:
        tables = traced.prologue(*tables)
    if traced.options is not None:
        arguments = option_arguments(traced.options, tables, query, batches, others)
        if arguments is not None:
            return arguments
    wanted = _NONE
    if torch.is_grad_enabled():
        wanted = frozenset([k for k in traced.numbers if tables[k].requires_grad])
    return _packed(traced.program(batches, wanted), tables, traced.numbers, traced.integers, query)


def _packed(
    program: Tensor, tables: Sequence[Tensor], numbers: Sequence[int], integers: Sequence[int], query: Tensor
) -> dict[str, Tensor]:
    """The program, and the tensors that it loads from, one after the other."""
    arguments = {"score_program": program}
    if numbers:
        sums = torch.float64 if query.dtype == torch.float64 else torch.float32
        arguments["score_numbers"] = _joined([tables[k] for k in numbers], sums)
    if integers:
        arguments["score_integers"] = _joined([tables[k] for k in integers], torch.int64)
    return arguments


def _joined(tables: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    parts = [_converted(table, dtype) for table in tables]
    return parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts])


def _converted(table: Tensor, dtype: torch.dtype) -> Tensor:
    return table if table.dtype is dtype else table.to(dtype)


# ----------------------------------------------------------------------------------------------------- torch.compile
def _constant_in_graphs(function: _Function) -> _Function:
    """torch.compiler.assume_constant_result, which would import Dynamo, and with it triton, for `import scaledot`."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _compiled_arguments(
    score_mod: Any, query: Tensor, batches: int, mode: _Mode, others: Mapping[str, Any]
) -> dict[str, Any]:
    """score_arguments in code that Dynamo traces."""
    tape = Tape()
    result = tape.record(score_mod)
    kinds = tuple([(tensor.dtype, tuple([int(size) for size in tensor.shape])) for tensor in tape.tensors])
    steps = (tuple(tape.steps), result)
    sources, numbers, integers, options = _taped_layout(steps, kinds, mode)
    tables = [tape.tensors[k] for k in sources]
    if options is not None:
        arguments = option_arguments(dict(options), tables, query, int(batches), others)
        if arguments is not None:
            return arguments
    wanted = tuple([k for k in numbers if tables[k].requires_grad])
    program = _taped_program(steps, kinds, mode, int(batches), wanted)
    return _packed(program, tables, numbers, integers, query)


@_constant_in_graphs
def _taped_layout(steps: Any, kinds: Any, mode: _Mode) -> tuple[Any, ...]:
    found = _taped(steps, kinds, mode)
    if found.sources is None or found.prologue is not None:
        raise NotImplementedError(
            "score_mod: got a function that computes with parts of captured tensors under torch.compile; needs tensors "
            "that are indexed at once"
        )
    options = None if found.options is None else tuple(found.options.items())
    return tuple(found.sources), tuple(found.numbers), tuple(found.integers), options


@_constant_in_graphs
def _taped_program(steps: Any, kinds: Any, mode: _Mode, batches: int, wanted: tuple[int, ...]) -> Tensor:
    return _taped(steps, kinds, mode).program(batches, frozenset(wanted))


def _taped(steps: Any, kinds: Any, mode: _Mode) -> Traced:
    key = repr((steps, kinds, mode))  # 1, 1.0 and True are equal
    if key not in _tapes:
        _tapes[key] = _taped_anew(steps, kinds, mode)
    return _tapes[key]


_tapes: dict[str, Traced] = {}


def _taped_anew(steps: Any, kinds: Any, mode: _Mode) -> Traced:
    tensors = [torch.zeros((), dtype=dtype, device="cpu").expand(shape) for dtype, shape in kinds]
    score_mod = replayed(steps[0], steps[1], tensors)
    return traced(score_mod, tensors, *mode)
