"""The Python functions: forms of arguments, results, overrides, explain, and the examples in docstrings."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import math
import pickle
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import reference
import scaledot
from scaledot import scaled_dot_product_attention
from scaledot.explanation import Explanation, KernelChoice, Refusal


def inputs(requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6))
    query, key, value = (
        torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=requires_grad) for s in shapes
    )
    return query, key, value


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True, "causal_alignment": "lower_right"},
    "window": {"window": (1, None)},
    "window_list": {"window": [None, 2]},
    "scale": {"scale": -0.3},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)},
    "mask": {"attn_mask": torch.arange(7) != 3},
    "masked_score": {"attn_mask": torch.arange(7) != 3, "masked_score": -1.5},
    "bias": {"attn_mask": torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5, 1)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_returned(name: str) -> None:
    arguments = {**OPTIONS[name], "enable_gqa": True}
    exact = dict(zip(("output", "lse", "weights"), reference.attention(*inputs(), **arguments), strict=True))
    for asked, order in {
        (): ("output",),
        ("weights",): ("output", "weights"),
        ("lse",): ("output", "lse"),
        ("lse", "weights"): ("output", "weights", "lse"),
    }.items():
        result = scaled_dot_product_attention(*inputs(), **arguments, **{f"return_{r}": True for r in asked})
        results = (result,) if isinstance(result, Tensor) else result
        assert isinstance(result, tuple) == bool(asked)
        torch.testing.assert_close(results, tuple(exact[r] for r in order))


def test_arguments_of_torch_are_positional() -> None:
    query = inputs()[0]
    mask = torch.ones(5, 5, dtype=torch.bool)
    ours = scaled_dot_product_attention(query, query, query, mask, 0.0, False, 0.5, False)
    torch.testing.assert_close(
        ours, torch.nn.functional.scaled_dot_product_attention(query, query, query, mask, 0.0, False, scale=0.5)
    )
    with pytest.raises(TypeError):
        scaled_dot_product_attention(*[query] * 3, None, 0.0, False, None, False, "upper_left")


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"window": 3}, TypeError, "window: got 3, an int; needs a pair"),
        ({"window": (1, 2, 3)}, TypeError, "window: got"),
        ({"window": "ab"}, TypeError, "window: got 'ab'"),
        ({"window": (1.0, 0)}, TypeError, "window: got a left side of 1.0, a float"),
        ({"window": (0, True)}, TypeError, "window: got a right side of True, a bool"),
        ({"window": (-1, 0)}, ValueError, "window: got a left side of -1"),
        ({"query": numpy.ones((2, 4, 5, 8))}, TypeError, r"query: got a numpy.ndarray of shape \(2, 4, 5, 8\)"),
        ({"value": [[1.0]]}, TypeError, "value: got a list; needs a torch.Tensor"),
        ({"attn_mask": [True]}, TypeError, "attn_mask: got a list; needs a torch.Tensor"),
        ({"masked_score": None}, TypeError, "masked_score: got None"),
        ({"masked_score": math.nan}, ValueError, "masked_score: got nan"),
        ({"dropout_p": math.nan}, ValueError, "dropout_p: got nan"),
    ],
)
@pytest.mark.parametrize("function", [scaled_dot_product_attention, scaledot.explain])
def test_errors(function: Any, option: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        function(**{**dict(zip(("query", "key", "value"), inputs(), strict=True)), "enable_gqa": True, **option})


def test_anything_that_is_an_index_can_be_a_window_side() -> None:
    expected = scaled_dot_product_attention(*inputs(), enable_gqa=True, window=(1, 0))
    for one in (numpy.int32(1), torch.tensor(1)):
        torch.testing.assert_close(scaled_dot_product_attention(*inputs(), enable_gqa=True, window=(one, 0)), expected)


def test_a_seed_is_drawn_only_for_dropout() -> None:
    def drawn(**options: Any) -> bool:
        before = torch.get_rng_state()
        scaled_dot_product_attention(*inputs(), enable_gqa=True, **options)
        return not torch.equal(before, torch.get_rng_state())

    assert not drawn()
    assert not drawn(dropout_p=0)
    assert drawn(dropout_p=0.1)
    before = torch.get_rng_state()
    scaledot.explain(*inputs(), enable_gqa=True, dropout_p=0.1)
    assert torch.equal(before, torch.get_rng_state())


def test_torch_function_modes_and_subclasses_are_asked() -> None:
    seen: list[tuple[Any, dict[str, Any]]] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is scaled_dot_product_attention:
                seen.append((args, kwargs))
            return func(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is scaled_dot_product_attention:
                seen.append((args, kwargs))
                return "taken over"
            return super().__torch_function__(func, types, args, kwargs)

    query, key, value = inputs()
    expected = scaled_dot_product_attention(query, key, value, enable_gqa=True, window=(2, 1))
    with Mode():
        result = scaled_dot_product_attention(query, key, value, enable_gqa=True, window=(2, 1))
    torch.testing.assert_close(result, expected)
    ((args, kwargs),) = seen
    assert len(args) == 8
    assert kwargs["window"] == (2, 1)
    for position in range(3):
        tensors: list[Any] = [query, key, value]
        tensors[position] = tensors[position].as_subclass(Subclass)
        assert scaled_dot_product_attention(*tensors) == "taken over"
    mask = torch.zeros(5, 7).as_subclass(Subclass)
    assert scaled_dot_product_attention(query, key, value, mask) == "taken over"


def test_explain() -> None:
    told = scaledot.explain(*inputs(), enable_gqa=True, is_causal=True)
    kernels = scaledot.build_info()["cpu_kernels"]
    assert (told.device, told.capability) == ("cpu", scaledot.cpu_capability())
    for choice in (told.forward, told.backward):
        place = kernels.index(choice.kernel)
        assert [refusal.kernel for refusal in choice.refused] == kernels[:place]
        assert all(refusal.reason for refusal in choice.refused)
        assert choice.workspace_bytes >= 0
    assert pickle.loads(pickle.dumps(told)) == told
    assert dataclasses.asdict(told)["forward"]["kernel"] == told.forward.kernel
    lines = str(told).splitlines()
    assert lines[0] == f"scaledot on cpu ({scaledot.cpu_capability()})"
    assert any("forward" in line and told.forward.kernel in line for line in lines)


def test_explain_prints_each_reason_once() -> None:
    refused = (Refusal("a", "too slow"), Refusal("b", "too long"), Refusal("c", "too slow"))
    choice = KernelChoice("d", refused, 100)
    assert str(Explanation(choice, KernelChoice("d", (), 5), "cpu", "default")).splitlines() == [
        "scaledot on cpu (default)",
        "  forward   d, 100 bytes of workspace",
        "            not a, c: too slow",
        "            not b: too long",
        "  backward  d, 5 bytes of workspace",
    ]


class RunsFused(TorchDispatchMode):
    """Whether torch's fused kernel for CPUs ran."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("options", "sdpa"),
    [
        ({}, "its fused kernel"),
        ({"is_causal": True, "scale": 0.3}, "its fused kernel"),
        ({"is_causal": True, "causal_alignment": "lower_right"}, "its fused kernel"),
        ({"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, "its fused kernel"),
        ({"dropout_p": 0.1}, "its slower path, which stores the weights; reason: dropout"),
        (
            {"attn_mask": torch.ones(5, 5, requires_grad=True)},
            "its slower path, which stores the weights; reason: attn_mask",
        ),
        ({"value_dim": 6}, "its slower path, which stores the weights; reason: value is not as wide as key"),
    ],
    ids=str,
)
def test_explain_says_what_torch_runs(options: dict[str, Any], sdpa: str) -> None:
    options = dict(options)
    query, value = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, options.pop("value_dim", 8))
    assert scaledot.explain(query, query, value, **options).sdpa == sdpa
    options.pop("causal_alignment", None)
    with RunsFused() as mode:
        torch.nn.functional.scaled_dot_product_attention(query, query, value, **options)
    assert mode.found == (sdpa == "its fused kernel")


def test_explain_of_a_mask_of_one_dimension() -> None:
    query, mask = torch.randn(2, 4, 5, 8), torch.ones(5, dtype=torch.bool)
    told = scaledot.explain(query, query, query, mask).sdpa
    try:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, mask)
    except IndexError:
        assert told == "cannot: it refuses an attn_mask of fewer than 2 dimensions"
    else:
        assert told is not None
        assert not told.startswith("cannot")


def test_explain_says_what_torch_runs_for_three_dimensions() -> None:
    """From torch 2.14 on, its fused kernel takes them."""
    query = torch.randn(4, 5, 8)
    with RunsFused() as mode:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    slower = "its slower path, which stores the weights; reason: it takes 4 dimensions"
    assert scaledot.explain(query, query, query).sdpa == ("its fused kernel" if mode.found else slower)


@pytest.mark.parametrize(
    ("options", "sdpa"),
    [
        ({"window": (1, 2), "softcap": 2.0}, "cannot: it has no softcap, window"),
        ({"is_causal": True, "causal_alignment": "lower_right"}, "cannot: it has no causal_alignment"),
        ({"return_weights": True, "return_lse": True}, "cannot: it has no return_lse, return_weights"),
        (
            {"is_causal": True, "attn_mask": torch.ones(5, 7), "dropout_p": 0.1},
            "cannot: its slower path takes either attn_mask or is_causal",
        ),
    ],
)
def test_explain_says_what_torch_lacks(options: dict[str, Any], sdpa: str) -> None:
    told = scaledot.explain(*inputs(), enable_gqa=True, **options)
    assert told.sdpa == sdpa
    assert str(told).splitlines()[-1] == f"  F.sdpa    {sdpa}"


def test_explain_says_nothing_of_torch_where_it_cannot_know() -> None:
    query = torch.empty(1, 2, 8, 4, device="meta")
    assert scaledot.explain(query, query, query).sdpa is None


def test_explain_needs_no_memory() -> None:
    query = torch.empty(1, 64, 2**20, 128, device="meta")
    told = scaledot.explain(query, query, query, is_causal=True)
    assert told.forward.workspace_bytes < 2**32
    assert "GiB" in str(dataclasses.replace(told, forward=dataclasses.replace(told.forward, workspace_bytes=2**33)))


def test_build_info_and_version() -> None:
    info = scaledot.build_info()
    assert info["version"] == scaledot.__version__
    assert info["torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert scaledot.cpu_capability() in scaledot._load.OPS.cpu_capabilities()
    for name in scaledot.__all__:
        assert hasattr(scaledot, name)


@pytest.mark.parametrize("module", ["functional", "explanation", "masks", "modules", "merge", "varlen"])
def test_examples(module: str) -> None:
    namespace = {"scaledot": scaledot, "torch": torch}
    results = doctest.testmod(importlib.import_module(f"scaledot.{module}"), extraglobs=namespace)
    assert results.failed == 0
