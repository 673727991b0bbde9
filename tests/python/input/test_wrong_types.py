"""Arguments of a wrong type, for every public function and class: one line that names the argument.

Nothing is accepted with another meaning. What torch accepts for a number is accepted: NumPy's and 0-d tensors.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import scaledot
from argument_kinds import Call, Kind, kinds
from bad_arguments import named_argument
from public_calls import FUNCTIONS

EACH = [(name, argument) for name, call in FUNCTIONS.items() for argument in call.kinds]


def check_refused(call: Call, argument: str, wrong: Any) -> None:
    try:
        call.with_(**{argument: wrong})
        message = None
    except (TypeError, ValueError) as error:
        message = str(error)
    assert message is not None, f"{argument}={wrong!r:.80} was accepted"
    assert "\n" not in message
    assert named_argument(message) == argument


@pytest.mark.parametrize(("name", "argument"), EACH)
def test_wrong_types_are_refused_by_name(name: str, argument: str) -> None:
    call = FUNCTIONS[name]
    call.with_()
    for wrong in call.kinds[argument].wrong:
        check_refused(call, argument, wrong)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_has_a_kind(name: str) -> None:
    call = FUNCTIONS[name]
    assert set(inspect.signature(call.function).parameters) == set(call.kinds)


def tensors(result: Any) -> list[Tensor]:
    if isinstance(result, torch.nn.Module):
        return list(result.parameters())
    if isinstance(result, (tuple, list)):
        return [tensor for part in result for tensor in tensors(part)]
    return [result] if isinstance(result, Tensor) else []


@pytest.mark.parametrize(("name", "argument"), EACH)
def test_numbers_may_be_spelled_as_torch_takes_them(name: str, argument: str) -> None:
    call = FUNCTIONS[name]
    value = call.arguments().get(argument)
    wanted = call.with_()
    for spelled in call.kinds[argument].spellings(value):
        found = call.with_(**{argument: spelled})
        assert type(found) is type(wanted)
        assert str(found) == str(wanted), f"{argument}={spelled!r}"
        assert all(map(torch.equal, tensors(found), tensors(wanted))), f"{argument}={spelled!r}"


def test_torch_takes_the_same_spellings() -> None:
    """And refuses the same tensors and arrays for a number; only a bool is a number to torch."""
    query = torch.randn(1, 2, 3, 4)
    kind: Kind = FUNCTIONS["explain"].kinds["scale"]

    def taken(scale: Any) -> bool:
        try:
            torch.nn.functional.scaled_dot_product_attention(query, query, query, scale=scale)
        except (TypeError, RuntimeError):
            return False
        return True

    assert all(taken(spelled) for spelled in kind.spellings(0.5))
    bools = [wrong for wrong in kind.wrong if taken(wrong)]
    assert all("bool" in str(getattr(wrong, "dtype", type(wrong))) for wrong in bools), bools


CONFIGS = {
    "config": (3, None, "d_model", [("d_model", 8)]),
    "d_model": (8.0, "8", None, True, torch.tensor(8.0)),
    "num_heads": (2.0, "2", None, True),
}


@pytest.mark.parametrize("argument", CONFIGS)
def test_a_config_of_wrong_types(argument: str) -> None:
    for wrong in CONFIGS[argument]:
        config = wrong if argument == "config" else {"d_model": 8, "num_heads": 2, argument: wrong}
        with pytest.raises(TypeError) as raised:
            scaledot.dropin.config_mha.MultiHeadAttention(config)
        assert named_argument(str(raised.value)) == argument


@pytest.mark.parametrize(
    ("argument", "wrong"), [("name", 3), ("name", None), ("name", b"x"), ("ignore", "use_cache"), ("ignore", [3])]
)
def test_register_of_wrong_types(argument: str, wrong: Any) -> None:
    from scaledot.dropin.transformers import register

    with pytest.raises(TypeError) as raised:
        register(**{argument: wrong})
    assert named_argument(str(raised.value)) == argument


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [("weights", "x"), ("weights", None), ("weights", [["a"]]), ("query_tokens", 3), ("key_tokens", 0.5), ("ax", "x")],
)
def test_heatmap_of_wrong_types(argument: str, wrong: Any) -> None:
    with pytest.raises(TypeError) as raised:
        scaledot.plot.attention_heatmap(**{"weights": torch.ones(2, 2), argument: wrong})
    assert named_argument(str(raised.value)) == argument


# ------------------------------------------------------------------------------------------------------- distributed
@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch was built without gloo")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def distributed_call(name: str, mesh: Any) -> Call:
    d, part = scaledot.distributed, {"tensor": torch.ones(4, 3), "mesh": mesh, "dim": 0}
    part_kinds = kinds(tensor="tensor", integer="dim", text="placement", mesh="mesh")
    query = torch.ones(2, 4, 6, 8)
    context = {"query": query, "key": query, "value": query, "mesh": mesh, "dropout_p": 0.5, "scale": 0.5}
    return {
        "shard": Call(d.shard, lambda: part, part_kinds),
        "unshard": Call(d.unshard, lambda: part, part_kinds),
        "positions": Call(
            d.positions,
            lambda: {"length": 5, "mesh": mesh},
            kinds(integer="length", text="placement", mesh="mesh", device="device"),
        ),
        "tensor_parallel": Call(
            d.tensor_parallel,
            lambda: {"module": scaledot.MultiHeadAttention(8, 2), "mesh": mesh},
            kinds(module="module", mesh="mesh"),
        ),
        "context_parallel_attention": Call(
            d.context_parallel_attention,
            lambda: {**context, "window": (1, 2), "softcap": 2.0},
            kinds(
                tensor="query key value",
                mesh="mesh",
                number="dropout_p",
                optional_number="scale softcap",
                flag="is_causal enable_gqa return_lse",
                text="method placement causal_alignment",
                window="window",
                optional_tensor="key_mask alibi_slopes",
                any="attn_mask return_weights relative_bias",
            ),
        ),
    }[name]


@pytest.mark.parametrize("name", ["shard", "unshard", "positions", "tensor_parallel", "context_parallel_attention"])
def test_wrong_types_of_distributed_functions(name: str, mesh: Any) -> None:
    call = distributed_call(name, mesh)
    assert set(inspect.signature(call.function).parameters) == set(call.kinds)
    call.with_()
    for argument, kind in call.kinds.items():
        for wrong in kind.wrong:
            check_refused(call, argument, wrong)
