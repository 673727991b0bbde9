"""From a score function to a graph of its operations."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .._checks import described
from .graph import Graph
from .operations import ALL_GRADIENTS, READS_VALUES, RULES, Table
from .options import as_options
from .program import captured_by, mask_part, program_part

__all__ = ["ScoreMod", "Traced", "traced"]

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

PLACES = ("batch", "head", "row", "key")  # the inputs after the score
_aten = torch.ops.aten
_TO_ARRAYS = frozenset([Tensor.numpy, Tensor.__array__, Tensor.__dlpack__])
_ARRAY = (
    "score_mod: got a function that makes a NumPy array of a tensor; needs operations of torch, and torch.from_numpy "
    "for arrays that it captures"
)


class _InFunction(torch.overrides.TorchFunctionMode):
    """Takes 0-d tensors as indices. Torch reads their values, which a trace has not.

    It refuses what a trace would lose: assignments to elements, and parts without gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = 0  # how many torch.enable_grad() are open

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:
            raise NotImplementedError(READS_VALUES)
        if func in _TO_ARRAYS:
            raise TypeError(_ARRAY)
        if func is Tensor.__setitem__:
            raise NotImplementedError(
                "score_mod: got an assignment to elements of a tensor; needs a function that changes no tensor"
            )
        if func is torch._C._set_grad_enabled:
            self._enabled += 1 if args[0] else -1
            if self._enabled < 0:  # a trace has no gradients, so it would not know where they end
                raise NotImplementedError(f"score_mod: got torch.no_grad(); needs {ALL_GRADIENTS}")
        if func is not Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        tensor, index = args
        places = list(index) if isinstance(index, tuple) else [index]
        if not any(isinstance(place, Tensor) for place in places):
            return func(*args)
        if any(isinstance(place, Tensor) and place.dtype == torch.bool for place in places):
            raise NotImplementedError("score_mod: got a boolean index; needs integers, or torch.where")
        if Ellipsis in [place for place in places if not isinstance(place, Tensor)]:
            at = next(k for k, place in enumerate(places) if place is Ellipsis)
            places[at : at + 1] = [slice(None)] * (tensor.dim() - len(places) + 1)
        for dim in range(len(places) - 1, -1, -1):  # from the last on, so that the numbers of dimensions stay
            if isinstance(places[dim], int):
                tensor = tensor.select(dim, places.pop(dim))
        if not all(isinstance(place, Tensor) or place == slice(None) for place in places):
            return func(*args)
        while places and not isinstance(places[-1], Tensor):
            places.pop()
        return _aten.index.Tensor(tensor, [place if isinstance(place, Tensor) else None for place in places])


class _NoReads(TorchDispatchMode):
    """Refuses to read the number in a tensor, for which a trace would keep the number of this call."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default:
            raise NotImplementedError(READS_VALUES)
        return func(*args, **(kwargs or {}))


class _FoundError(Exception):
    def __init__(self, frames: Sequence[traceback.FrameSummary]) -> None:
        self.frames = frames


class _Find(TorchDispatchMode):
    """Raises where an operation is called, with the frames of the call."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == self._name:
            raise _FoundError(traceback.extract_stack()[:-1])
        return func(*args, **(kwargs or {}))


@dataclass
class Traced:
    """The program of a function, and where its captured tensors are."""

    graph: Graph
    result: int
    score: int
    # The number among the captured tensors of each that the function computes with. None: they cannot be found
    # again, so the function is traced in each call.
    sources: list[int] | None
    tensors: list[Tensor]  # without sources; empty otherwise, so that a trace keeps no tensor alive
    prologue: fx.GraphModule | None  # from these tensors to those that the program loads from; None: they are the same
    numbers: list[int]  # of the tensors that the program loads from, which are floating
    integers: list[int]  # and which are not
    options: dict[str, Any] | None  # that do the same (as_options)
    programs: dict[Any, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Whether it is run as a program that loads from one tensor, floating, the only one that the function captures.
        self.is_one_table = self.sources == self.numbers == [0] and self.prologue is None and self.options is None

    def program(self, batches: int, wanted: frozenset[int]) -> Tensor:
        """`wanted`: the tensors that it loads from whose gradients the backward needs."""
        key = (batches, wanted) if wanted else batches
        program = self.programs.get(key)
        if program is None:
            forward = program_part(self.graph, self.result, self.score, None)
            backward = program_part(self.graph, self.result, self.score, wanted)
            mask = mask_part(self.graph, self.result, self.score)
            header = (batches, captured_by(self.graph, wanted), len(forward), len(backward))
            words = [*header, *forward, *backward, *mask]
            with _disable_current_modes():  # those of a trace would take it for a part of theirs
                program = torch.tensor(words, dtype=torch.int64, device="cpu")
            self.programs[key] = program
        return program


def traced(score_mod: ScoreMod, captured: Sequence[Tensor], double: bool, small: bool) -> Traced:
    """The function's program.

    `captured`: tensors that it may read; `double`: query is float64; `small`: no position is above `SMALL`.

    Raises:
        NotImplementedError: it does what no program can; the message names the operation.
    """
    return Trace(score_mod, captured, double, small).traced()


class Trace:
    """One function on its way to a graph."""

    def __init__(self, score_mod: ScoreMod, captured: Sequence[Tensor], double: bool, small: bool) -> None:
        self._captured = captured
        self._score_mod = score_mod
        self.graph = Graph(small)
        self._module = _make_fx(score_mod, torch.float64 if double else torch.float32)
        self.lowered: dict[fx.Node, Any] = {}  # a node of the graph, or a Table
        self._tables: list[fx.Node] = []
        self._narrow: torch.dtype | None = None  # of the operation that is lowered
        self._offsets: dict[int, int] = {}  # of each table, among those of its kind

    def traced(self) -> Traced:
        nodes = list(self._module.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        self._score = self.graph.add("score")
        for node, value in zip(inputs, [self._score, *map(self.graph.add, PLACES)], strict=True):
            self.lowered[node] = value
        self._find_tables(nodes)
        result: Any = None
        for node in nodes:
            if node.op == "output":
                result = node.args[0]
            elif node not in self.lowered and node not in self._outside:
                self.lowered[node] = self._lower(node)
        value = self.value(result, integer=False)
        tensors, prologue = self._prologue(nodes)
        sources = self._sources(tensors)
        return Traced(
            self.graph,
            value,
            self._score,
            sources,
            tensors if sources is None else [],
            prologue,
            [k for k, table in enumerate(self._tables) if is_floating(table)],
            [k for k, table in enumerate(self._tables) if not is_floating(table)],
            as_options(self.graph, value, self._score),
        )

    # ------------------------------------------------------------------------------------------- captured tensors
    def _find_tables(self, nodes: Sequence[fx.Node]) -> None:
        """Finds values that the function's inputs do not change: computed once a call, and tables for the rest."""
        self._outside: set[fx.Node] = set()
        for node in nodes:
            if node.op == "get_attr" or (
                node.op == "call_function"
                and node.all_input_nodes
                and all(operand in self._outside for operand in node.all_input_nodes)
            ):
                self._outside.add(node)
                if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
                    raise NotImplementedError(
                        f"score_mod: got the operation {node.target.overloadpacket.__name__} on a captured tensor; "
                        "needs a function that changes no tensor"
                    )
        for node in nodes:
            if node not in self._outside:
                for operand in node.all_input_nodes:
                    if operand in self._outside and operand not in self._tables:
                        self._tables.append(operand)
        sizes = {True: 0, False: 0}
        for number, node in enumerate(self._tables):
            _check_real(node)
            shape, kind = tuple(node.meta["val"].shape), is_floating(node)
            if not all(isinstance(size, int) for size in shape):
                raise NotImplementedError(
                    "score_mod: got a captured tensor whose shape depends on numbers, as that of nonzero() does; needs "
                    "one that is computed before the call"
                )
            self._offsets[number] = sizes[kind]
            sizes[kind] += math.prod(shape)
            self.lowered[node] = Table(number, shape, (None,) * len(shape))

    def _prologue(self, nodes: Sequence[fx.Node]) -> tuple[list[Tensor], fx.GraphModule | None]:
        """The tensors that the function captures, and the graph from them to the tables."""
        graph, known = fx.Graph(), {}
        tensors: list[Tensor] = []
        for node in nodes:
            if node in self._outside:
                if node.op == "get_attr":
                    tensors.append(operator.attrgetter(str(node.target))(self._module))
                    known[node] = graph.placeholder(f"captured_{len(tensors)}")
                else:
                    known[node] = graph.node_copy(node, known.__getitem__)
        if [node.op for node in self._tables] == ["get_attr"] * len(tensors):
            return [operator.attrgetter(str(node.target))(self._module) for node in self._tables], None
        graph.output(tuple(known[node] for node in self._tables))
        return tensors, fx.GraphModule(torch.nn.Module(), graph)

    def _sources(self, tensors: Sequence[Tensor]) -> list[int] | None:
        places = {id(tensor): k for k, tensor in enumerate(self._captured)}
        if not all(id(tensor) in places for tensor in tensors):
            return None
        return [places[id(tensor)] for tensor in tensors]

    # ------------------------------------------------------------------------------------------- operations
    def _lower(self, node: fx.Node) -> Any:
        name = (
            node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else str(node.target)
        )
        rule = RULES.get(name)
        if rule is None:
            raise NotImplementedError(self._refusal(name, node))
        _check_real(node)
        self._narrow = _narrow_dtype(node)
        try:
            result = rule(self, node, *node.args, **node.kwargs)
        except (NotImplementedError, ValueError) as error:
            same = [other for other in self._module.graph.nodes if other.target == node.target]
            raise type(error)(_with_place(str(error), self._where(name) if same == [node] else "")) from None
        if self._narrow is not None and isinstance(result, int) and node.meta["val"].dtype == self._narrow:
            result = self.graph.wrapped(result, *_limits(self._narrow))
        return result

    def _refusal(self, name: str, node: fx.Node) -> str:
        """The error for an operation without a rule."""
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            needs = "a function that changes no tensor"
        else:
            needs = (
                "one that kernels have, such as arithmetic, comparisons, torch.where, exp and tanh, and captured "
                "tensors indexed by b, h, q_idx and kv_idx"
            )
        return f"score_mod: got the operation {name}{self._where(name)}; needs {needs}"

    def may_have_gradient(self, node: fx.Node) -> bool:
        """Whether a node is computed from the score or from a floating table, by floating operations."""
        seen, left = set(), [node]
        while left:
            node = left.pop()
            if node in seen or not is_floating(node):
                continue
            if node in self._tables or node.op == "placeholder":  # only the score is floating
                return True
            seen.add(node)
            left += node.all_input_nodes
        return False

    def _where(self, name: str) -> str:
        """The line of the function that calls the operation."""
        with contextlib.suppress(Exception), torch.no_grad():
            try:
                with _Find(name), _InFunction():
                    self._score_mod(torch.zeros(()), *(torch.zeros((), dtype=torch.int64) for _ in PLACES))
            except _FoundError as found:
                return _place(found.frames)
        return ""

    def value(self, operand: Any, integer: bool) -> int:
        """An operand as a number, or as an integer."""
        f = self.graph
        if isinstance(operand, fx.Node):
            operand = self.lowered[operand]
            if isinstance(operand, Table):
                operand = self._loaded(operand)
        elif isinstance(operand, (int, float)):
            if integer and self._narrow is not None:
                low, high = _limits(self._narrow)
                operand = (int(operand) - low) % (high - low + 1) + low
            if integer and not -(2**63) <= operand < 2**63:
                raise ValueError(f"score_mod: got the integer {operand:.3e}; needs one of 64 bits")
            return f.integer(int(operand)) if integer else f.number(operand)
        else:
            raise NotImplementedError(f"score_mod: got {described(operand)} as an operand; needs tensors and numbers")
        if not integer:
            return f.as_number(operand)
        return operand if operand in f.ranges else f.as_integer(operand)

    def _loaded(self, table: Table) -> int:
        if any(place is None and size != 1 for place, size in zip(table.index, table.shape, strict=True)):
            left = tuple(table.shape[dim] for dim in table.left())
            raise NotImplementedError(
                f"score_mod: got a captured tensor of shape {left} as an operand; needs an index for each dimension"
            )
        index = [self.graph.integer(0) if place is None else place for place in table.index]
        number = is_floating(self._tables[table.number])
        offset = self._offsets[table.number]
        loaded = self.graph.load(number, table.number, offset, table.shape, index)
        dtype = self._tables[table.number].meta["val"].dtype
        if dtype in _NARROW:
            self.graph.ranges[loaded] = _limits(dtype)
        return loaded


def _check_real(node: fx.Node) -> None:
    dtype = getattr(node.meta.get("val"), "dtype", None)
    if dtype is not None and dtype.is_complex:
        raise TypeError(f"score_mod: got one that computes with {dtype}; needs real numbers")


_NARROW = (torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int16, torch.int32)


def _narrow_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype that an operation computes integers in, if torch's results wrap around before those of int64 do."""
    dtype = node.meta["val"].dtype
    if dtype == torch.bool:  # a comparison, in the dtype of both operands
        for operand in [n.meta["val"].dtype for n in node.all_input_nodes]:
            dtype = operand if dtype == torch.bool else torch.promote_types(dtype, operand)
    return dtype if dtype in _NARROW else None


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    info = torch.iinfo(dtype)
    return info.min, info.max


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    """The line of the user's that is innermost among frames, in brackets; empty if there is none."""
    others = (os.path.dirname(__file__), contextlib.__file__, functools.__file__)
    theirs = [f for f in frames if not f.filename.startswith(others) and f"{os.sep}torch{os.sep}" not in f.filename]
    return f" ({os.path.basename(theirs[-1].filename)}, line {theirs[-1].lineno})" if theirs else ""


def _raised_at(error: BaseException) -> str:
    """The line of a score function that raised an error while it was traced."""
    frames = traceback.extract_tb(error.__traceback__)
    calls = [k for k, f in enumerate(frames) if f.filename == __file__ and f.name == "traced"]
    return _place(frames[calls[-1] :]) if calls else ""


def _with_place(message: str, place: str) -> str:
    """`message` with a line of code after what it got."""
    got, needs, rest = message.partition("; needs ")
    return message if place in message else f"{got}{place}{needs}{rest}"


_CONDITION = (
    "score_mod: got a function that returns a condition, torch.bool; needs one that returns a score: a mask_mod "
    "belongs in block_mask=scaledot.BlockMask.from_mask_mod(mask_mod, B, H, Lq, Lk)"
)


def _make_fx(score_mod: ScoreMod, dtype: torch.dtype) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx  # these take long to import
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    places = [torch.zeros((), dtype=torch.int64) for _ in PLACES]

    def traced(*inputs: Tensor) -> Tensor:
        with _InFunction(), _NoReads():
            result = score_mod(*inputs)  # type: ignore[call-arg]
        if isinstance(result, bool) or (isinstance(result, Tensor) and result.dtype == torch.bool):
            raise TypeError(_CONDITION)
        if isinstance(result, (int, float)):
            result = torch.full((), float(result), dtype=dtype)
        if not isinstance(result, Tensor):
            raise TypeError(f"score_mod: got {described(result)} as its result; needs a score")
        if result.numel() != 1:
            raise ValueError(
                f"score_mod: got a result of shape {tuple(result.shape)}; needs one score, so an "
                "index for each dimension of a captured tensor"
            )
        return result

    try:
        # Dynamo and others that are tracing the call have modes of their own.
        with torch.no_grad(), torch._guards.tracing(None), _disable_current_modes():
            return make_fx(
                traced,
                _decompositions(),
                tracing_mode="fake",
                _allow_non_fake_inputs=True,
            )(torch.zeros((), dtype=dtype), *places)
    except (GuardOnDataDependentSymNode, torch._subclasses.fake_tensor.DataDependentOutputException) as error:
        raise NotImplementedError(_with_place(READS_VALUES, _raised_at(error))) from error
    except Exception as error:
        message, place = str(error).partition("\n")[0], _raised_at(error)
        if message.startswith("score_mod: "):
            raise type(error)(_with_place(message, place)) from error
        kind = next((kind for kind in _ERRORS if isinstance(error, kind)), RuntimeError)
        message = message if len(message) <= 100 else f"{message[:97]}..."
        raise kind(
            f"score_mod: got one that raises {type(error).__name__}{place}: {message}; needs a function of (score, b, "
            "h, q_idx, kv_idx), tensors without dimensions"
        ) from error


_ERRORS = (NotImplementedError, IndexError, ValueError, TypeError, RuntimeError)


def _decompositions() -> Any:
    from torch._decomp import get_decompositions

    names = (
        "addcdiv addcmul celu elu gelu hardshrink hardsigmoid hardswish hardtanh heaviside leaky_relu lerp "
        "log_sigmoid_forward logit mish nan_to_num selu silu sinc softplus softshrink threshold xlogy square"
    )
    return get_decompositions([getattr(_aten, name) for name in names.split() if hasattr(_aten, name)])


def is_floating(node: fx.Node) -> bool:
    return bool(node.meta["val"].dtype.is_floating_point)
