"""From a score function, as FlexAttention takes it, to the arguments of the ops.

A function is traced once for each kind of what it captures: the dtypes and shapes of its tensors, and the values of
its other variables. The program reads the tensors' numbers in each call, so they may change between calls, and so may
the tensors themselves.
"""

from __future__ import annotations

import math
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from .._captured import captured_values
from .._checks import described
from .._torch.dtensor import any_dtensor
from .graph import SMALL
from .recorder import Tape, replayed
from .trace import ScoreMod, Traced, traced

__all__ = ["known", "known_options", "score_arguments"]

_KEPT = 256  # traced functions
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Mode = tuple[bool, bool]  # query is float64; no position is above SMALL
_OPTIONS = "_scaledot_options"  # the attribute of a score function that options of the ops compute


def known(score_mod: ScoreMod, options: dict[str, Any]) -> ScoreMod:
    """`score_mod`, marked as what `options` of the ops compute."""
    setattr(score_mod, _OPTIONS, options)
    return score_mod


def known_options(score_mod: Any) -> dict[str, Any] | None:
    found: dict[str, Any] | None = getattr(score_mod, _OPTIONS, None)
    return found


def score_arguments(
    score_mod: Any, query: Tensor, key: Tensor, value: Tensor, others: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of the ops that say what `score_mod` does. `others`: the arguments so far.

    Raises:
        TypeError: `score_mod` is not a function.
        ValueError: `others` change scores too.
        NotImplementedError: it does what no score program can; the message names the operation.
    """
    if not callable(score_mod):
        raise TypeError(f"score_mod: got {described(score_mod)}; needs a function of (score, b, h, q_idx, kv_idx)")
    for name in ("softcap", "alibi_slopes", "relative_bias"):
        if others.get(name) is not None:
            raise ValueError(
                f"score_mod: got one with {name}; needs one of them "
                f"(scaledot.score_mods.{name.removesuffix('_slopes')} is a score function, and "
                "scaledot.score_mods.compose joins it with others)"
            )
    options = known_options(score_mod)
    if options is not None:
        return options
    if not (type(query) is type(key) is type(value) is Tensor) and any_dtensor(query, key, value):
        raise NotImplementedError("score_mod: got DTensors; needs local tensors (to_local())")
    leading = {query.shape[:-3], key.shape[:-3], value.shape[:-3]}
    batches = max(math.prod(leading.pop() if len(leading) == 1 else torch.broadcast_shapes(*leading)), 1)
    small = max(batches, *query.shape[-3:-1], key.shape[-2]) <= SMALL
    mode = (query.dtype == torch.float64, small)
    if is_dynamo_compiling():
        return _compiled_arguments(score_mod, query, batches, mode)
    values = captured_values(score_mod)
    if any(isinstance(value, Tensor) and type(value) not in (Tensor, Parameter) for value in values):
        return _compiled_arguments(score_mod, query, batches, mode)  # torch.export's, for example
    if any(isinstance(value, Tensor) and is_batchedtensor(value) for value in values):
        raise NotImplementedError(
            "score_mod: got a captured tensor with a dimension of torch.vmap; needs one that all samples share"
        )
    kind = (mode, *map(_kind, values))
    found = _traced.get(kind)
    if found is None:
        found = traced(score_mod, values, *mode)
        if found.sources is not None:
            _traced[kind] = found
            if len(_traced) > _KEPT:
                _traced.popitem(last=False)
    else:
        _traced.move_to_end(kind)
    return _call_arguments(found, values, query, batches)


_traced: OrderedDict[tuple[Any, ...], Traced] = OrderedDict()


def _kind(value: Any) -> Any:
    """What of a captured value a trace depends on."""
    if isinstance(value, Tensor):
        return ("tensor", value.dtype, value.shape)
    if isinstance(value, types.FunctionType):
        return value.__code__
    if isinstance(value, (list, tuple, dict)):
        return (type(value), len(value), *value) if isinstance(value, dict) else (type(value), len(value))
    return (type(value), value)


def _call_arguments(traced: Traced, values: Sequence[Any], query: Tensor, batches: int) -> dict[str, Any]:
    tables: Sequence[Tensor] = traced.tensors if traced.sources is None else [values[k] for k in traced.sources]
    for tensor in tables:
        if tensor.device != query.device:
            raise ValueError(
                f"score_mod: got a captured tensor on {tensor.device}; needs it on query's device, {query.device}"
            )
    if traced.prologue is not None:
        tables = traced.prologue(*tables)
    wanted = frozenset(
        k for k, table in enumerate(tables) if traced.is_number[k] and torch.is_grad_enabled() and table.requires_grad
    )
    arguments = {"score_program": traced.program(batches, wanted)}
    return {**arguments, **_captured_arguments(tables, traced.is_number, query)}


def _captured_arguments(tables: Sequence[Tensor], is_number: Sequence[bool], query: Tensor) -> dict[str, Tensor]:
    """The tensors that a program loads from, one after the other, for the ops."""
    arguments = {}
    sums = torch.float64 if query.dtype == torch.float64 else torch.float32
    for name, dtype, kind in (("score_numbers", sums, True), ("score_integers", torch.int64, False)):
        parts = [table.to(dtype).reshape(-1) for k, table in enumerate(tables) if is_number[k] is kind]
        if parts:
            arguments[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return arguments


# ----------------------------------------------------------------------------------------------------- torch.compile
def _constant_in_graphs(function: _Function) -> _Function:
    """torch.compiler.assume_constant_result, which would import Dynamo, and with it triton, for `import scaledot`."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _compiled_arguments(score_mod: Any, query: Tensor, batches: int, mode: _Mode) -> dict[str, Any]:
    """score_arguments in code that Dynamo traces."""
    tape = Tape()
    result = tape.record(score_mod)
    kinds = tuple([(tensor.dtype, tuple([int(size) for size in tensor.shape])) for tensor in tape.tensors])
    steps = (tuple(tape.steps), result)
    sources, is_number = _taped_layout(steps, kinds, mode)
    tables = [tape.tensors[k] for k in sources]
    wanted = tuple([k for k in range(len(tables)) if is_number[k] and tables[k].requires_grad])
    program = _taped_program(steps, kinds, mode, int(batches), wanted)
    return {"score_program": program, **_captured_arguments(tables, is_number, query)}


@_constant_in_graphs
def _taped_layout(steps: Any, kinds: Any, mode: _Mode) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    found = _taped(steps, kinds, mode)
    if found.sources is None or found.prologue is not None:
        raise NotImplementedError(
            "score_mod: got a function that computes with parts of captured tensors under torch.compile; needs tensors "
            "that are indexed at once"
        )
    return tuple(found.sources), tuple(found.is_number)


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
