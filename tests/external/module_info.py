"""torch's ModuleInfo of nn.MultiheadAttention, run with `dropin.torch_nn.MultiheadAttention`, and of the modules that
contain it, converted.

The ModuleInfo is part of an installed torch. The checks follow those that torch runs over every ModuleInfo, whose file
is not installed.
"""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_utils import gradcheck, gradgradcheck, noncontiguous_like

from agreement import check_agreement, results_of, solve
from external.tally import Tally
from scaledot.dropin import torch_nn

SUITE = f"torch {torch.__version__}: ModuleInfo of nn.MultiheadAttention"
DTYPES = (torch.float32, torch.float64)  # the dtypes of the ModuleInfo
Case = tuple[str, nn.Module, nn.Module, dict[str, Any]]


@cache
def module_info(cls: type[nn.Module]) -> Any:
    return next(info for info in module_db if info.module_cls is cls)


def inputs(cls: type[nn.Module], dtype: torch.dtype, training: bool, requires_grad: bool = False) -> list[Any]:
    torch.manual_seed(0)
    info = module_info(cls)
    given = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=requires_grad, training=training)
    return [x for x in given if x.forward_input is not None]


def built(given: Any, cls: type[nn.Module], dtype: torch.dtype, training: bool) -> nn.Module:
    """The module with random parameters. torch would leave the biases at 0."""
    module: nn.Module = copy.deepcopy(cls(*given.constructor_input.args, **given.constructor_input.kwargs)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return module.train(training)


def title(given: Any, *more: object) -> str:
    named = [f"{k}={v}" for k, v in given.constructor_input.kwargs.items()]
    shapes = {k: None if v is None else "x".join(map(str, v.shape)) for k, v in given.forward_input.kwargs.items()}
    return " ".join([*named, *(f"{k}={shape}" for k, shape in shapes.items()), *map(str, more)])


def cases(
    cls: type[nn.Module] = nn.MultiheadAttention,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    modes: Sequence[bool] = (False, True),
) -> Iterator[Case]:
    """For each input, dtype and mode: a title, torch's module, ours with its parameters, and the arguments by name."""
    for dtype, training in itertools.product(dtypes, modes):
        for given in inputs(cls, dtype, training):
            theirs = built(given, cls, dtype, training)
            if cls is nn.MultiheadAttention:
                ours = built(given, torch_nn.MultiheadAttention, dtype, training)
                ours.load_state_dict(theirs.state_dict())
            else:
                ours = torch_nn.convert(copy.deepcopy(theirs))
            bound = inspect.signature(theirs.forward).bind(*given.forward_input.args, **given.forward_input.kwargs)
            yield title(given, dtype, "training" if training else "eval"), theirs, ours, dict(bound.arguments)


def forward(tally: Tally) -> None:
    """Compares with the reference of the ModuleInfo: the same input as a batch of one."""
    for dtype, training in itertools.product(DTYPES, (False, True)):
        for given in inputs(nn.MultiheadAttention, dtype, training):
            with tally.case(title(given, dtype, training)):
                ours = built(given, torch_nn.MultiheadAttention, dtype, training)
                found = ours(*given.forward_input.args, **given.forward_input.kwargs)
                assert_close(found, given.reference_fn(ours, *given.forward_input.args, **given.forward_input.kwargs))


def agreement(tally: Tally) -> None:
    for name, theirs, ours, arguments in cases(dtypes=(torch.float32,), modes=(True,)):
        with tally.case(name):
            check_agreement(ours, theirs, arguments, torch.float32)


def closeness(*classes: type[nn.Module]) -> Callable[[Tally], None]:
    """Results and all gradients are those of torch in float64, in both modes. Without gradients, torch takes its fused
    path."""

    def check(tally: Tally) -> None:
        for cls in classes:
            for name, theirs, ours, arguments in cases(cls, dtypes=(torch.float64,)):
                with tally.case(f"{cls.__name__} {name}"):
                    assert_close(solve(ours, arguments, torch.float64), solve(theirs, arguments, torch.float64))
                    with torch.no_grad():
                        assert_close(results_of(ours(**arguments)), results_of(theirs(**arguments)))

    return check


def gradients(check: Callable[..., bool]) -> Callable[[Tally], None]:
    """Checks gradients of the inputs and all parameters, as torch's test_grad and test_gradgrad do."""

    def run(tally: Tally) -> None:
        for name, _, ours, arguments in cases(dtypes=(torch.float64,), modes=(True,)):
            with tally.case(name):
                given = {k: x for k, x in arguments.items() if isinstance(x, Tensor) and x.is_floating_point()}
                rest = {k: x for k, x in arguments.items() if k not in given}
                leaves = [*given.values(), *ours.parameters()]

                def function(*leaves: Tensor, ours: nn.Module = ours, given: Any = given, rest: Any = rest) -> Any:
                    named = dict(zip(given, leaves, strict=False))
                    parameters = dict(zip(dict(ours.named_parameters()), leaves[len(given) :], strict=True))
                    return tuple(results_of(torch.func.functional_call(ours, parameters, (), {**named, **rest})))

                assert check(function, [leaf.detach().requires_grad_() for leaf in leaves])

    return run


def noncontiguous(tally: Tally) -> None:
    for name, _, ours, arguments in cases(dtypes=(torch.float64,)):
        with tally.case(name):
            expected = solve(ours, arguments, torch.float64)
            strided = {k: noncontiguous_like(x) if isinstance(x, Tensor) else x for k, x in arguments.items()}
            for parameter in ours.parameters():
                parameter.data = noncontiguous_like(parameter.data)
            assert not any(p.is_contiguous() for p in ours.parameters() if p.numel() > 1)
            assert_close(solve(ours, strided, torch.float64), expected)


def copies(tally: Tally) -> None:
    """state_dict in both directions, pickle, torch.save and deepcopy give the same bits; repr is that of torch."""
    for name, theirs, ours, arguments in cases():
        with tally.case(name):
            expected = results_of(ours(**arguments))
            assert list(ours.state_dict()) == list(theirs.state_dict())
            theirs.load_state_dict(ours.state_dict())
            saved = io.BytesIO()
            torch.save(ours, saved)
            saved.seek(0)
            restored = [pickle.loads(pickle.dumps(ours)), torch.load(saved, weights_only=False), copy.deepcopy(ours)]
            for twin in restored:
                assert (type(twin), twin.training) == (type(ours), ours.training)
                assert all(map(torch.equal, results_of(twin(**arguments)), expected))
            assert repr(ours) == repr(theirs)


def factory(tally: Tally) -> None:
    """The constructor's device and dtype reach every parameter, also through the meta device and to_empty."""
    for dtype in (*DTYPES, torch.bfloat16, torch.float16):
        for given in inputs(nn.MultiheadAttention, torch.float32, True):
            with tally.case(title(given, dtype)):
                arguments = {**given.constructor_input.kwargs, "dtype": dtype}
                empty = torch_nn.MultiheadAttention(**arguments, device="meta")
                assert {(p.device.type, p.dtype) for p in empty.parameters()} == {("meta", dtype)}
                module = empty.to_empty(device="cpu")
                module.load_state_dict(torch_nn.MultiheadAttention(**arguments).state_dict())
                assert {(p.device.type, p.dtype) for p in module.parameters()} == {("cpu", dtype)}
                arrays = [x.to(dtype) for x in given.forward_input.args]
                output, weights = module(*arrays, **given.forward_input.kwargs)
                assert output.dtype == weights.dtype == dtype
                meta, _ = torch_nn.MultiheadAttention(**arguments, device="meta")(
                    *(x.to("meta") for x in arrays),
                    **{k: None if x is None else x.to("meta") for k, x in given.forward_input.kwargs.items()},
                )
                assert (meta.shape, meta.dtype) == (output.shape, dtype)


def modes(tally: Tally) -> None:
    """Without dropout, training and eval give the same bits; with dropout, only training drops."""
    for name, _, ours, arguments in cases(modes=(True,)):
        with tally.case(name):
            expected = results_of(ours(**arguments))
            assert all(map(torch.equal, results_of(ours.eval()(**arguments)), expected))
            ours.dropout = 0.5
            assert all(map(torch.equal, results_of(ours(**arguments)), expected))
            torch.manual_seed(0)
            dropped = [results_of(ours.train()(**arguments))[0] for _ in range(8)]
            assert any(not torch.equal(output, expected[0]) for output in dropped)


def not_applicable(tally: Tally) -> None:
    """The checks of torch that do not apply."""
    count = len(inputs(nn.MultiheadAttention, torch.float32, True))
    tally.skip("test_memory_format: torch skips it, nn.MultiheadAttention has no channels_last", count)
    tally.skip("test_errors: its ModuleInfo has no error inputs", count)
    tally.skip("test_check_inplace: it has no argument `inplace`", count)
    if not torch.cuda.is_available():
        tally.skip("test_cpu_gpu_parity, test_multiple_device_transfer: no CUDA device", 2 * count)


CONTAINERS = (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.TransformerDecoderLayer, nn.Transformer)
CHECKS: dict[str, Callable[[Tally], None]] = {
    "forward": forward,
    "numerics rule, against float64": agreement,
    "results and gradients are torch's": closeness(nn.MultiheadAttention),
    "gradcheck": gradients(gradcheck),
    "gradgradcheck": gradients(gradgradcheck),
    "noncontiguous": noncontiguous,
    "state_dict, pickle, deepcopy, repr": copies,
    "device and dtype": factory,
    "train and eval": modes,
    "other checks": not_applicable,
    "converted Transformer modules": closeness(*CONTAINERS),
}
