"""The op in the modes of torch: autocast, no_grad, inference mode, meta and fake tensors, torch.compile."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import eager
import scaledot
from case_list import BY_NAME
from cases import Case, Inputs
from kernels_under_test import sdpa

NAMES = [
    "plain-float32", "causal-bfloat16", "everything-float16", "weights-float64", "gqa-float32", "value_dim-bfloat16",
    "2d-float32", "3d-float32", "5d-float32", "6d-float32", "crossed_batches-float32", "fewer_batch_dims-float64",
    "one_kv_head-float32", "one_query_head-float32", "one_key_head-float32", "blhd-float32", "bias-float32",
    "dropout-float32", "decode-float32",
]  # fmt: skip


def described(tensors: tuple[Tensor, ...] | list[Tensor]) -> list[tuple[Any, ...]]:
    return [(tuple(t.shape), t.stride(), t.dtype) for t in tensors]


def results_and_gradients(case: Case, inputs: Inputs) -> list[Tensor]:
    inputs = inputs.requiring_grad()
    output, lse, weights = sdpa(case, inputs)
    gradients = torch.autograd.grad(output.sum() + lse.sum(), list(inputs.differentiable().values()))
    return [output, lse, weights, *gradients]


@pytest.mark.parametrize("name", NAMES)
def test_meta_and_fake_tensors_have_real_shapes_and_strides(name: str) -> None:
    case = BY_NAME[name]
    inputs = case.make()
    real = described(results_and_gradients(case, inputs))

    def to_meta(tensor: Tensor) -> Tensor:
        if tensor is inputs.dropout_seed:
            return tensor.to("meta")
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    assert described(results_and_gradients(case, inputs.mapped(to_meta))) == real
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = inputs.mapped(lambda t: mode.from_tensor(t))
        assert described(results_and_gradients(case, fake)) == real


def test_no_grad_and_inference_mode_give_the_same_bits() -> None:
    case = Case("no grad", mask="float")
    inputs = case.make().requiring_grad()
    wanted = sdpa(case, inputs)[0]
    assert wanted.requires_grad
    with torch.no_grad():
        found = sdpa(case, inputs)[0]
        assert not found.requires_grad
        assert torch.equal(found, wanted)
    with torch.inference_mode():
        found = sdpa(case, inputs)[0]
        assert found.is_inference()
        assert torch.equal(found, wanted)
        made_inside = case.make()
        assert torch.equal(sdpa(case, made_inside)[0], wanted)
    inputs = case.make()
    assert not sdpa(case, inputs)[0].requires_grad


def test_all_results_require_grad_and_a_bool_mask_does_not() -> None:
    case = Case("bool weights", return_weights=True, mask="bool")
    inputs = case.make().requiring_grad()
    output, lse, weights = sdpa(case, inputs)
    assert output.requires_grad
    assert lse.requires_grad
    assert weights.requires_grad
    assert inputs.attn_mask is not None
    assert not inputs.attn_mask.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_inputs(dtype: torch.dtype) -> None:
    """Casts as F.sdpa does: floating inputs are cast, and gradients have the dtype of the inputs."""
    case = Case("autocast", mask="float", mask_shape="1HQK", return_weights=True, alibi="H")
    inputs = case.make().requiring_grad()
    with torch.autocast("cpu", dtype):
        output, lse, weights = sdpa(case, inputs)
    assert output.dtype == dtype
    assert weights.dtype == dtype
    assert lse.dtype == torch.float32
    cast = inputs.mapped(lambda t: t.detach().to(dtype))
    cast.alibi_slopes = inputs.alibi_slopes
    mask_in_own_dtype = cast.mapped(lambda t: t)
    assert inputs.attn_mask is not None
    mask_in_own_dtype.attn_mask = inputs.attn_mask.detach()
    candidates = [sdpa(case, c)[0] for c in (cast, mask_in_own_dtype)]
    assert any(torch.equal(output, c) for c in candidates)
    for name, gradient in eager.gradients((output, lse, weights), case.cotangents(), inputs.differentiable()).items():
        assert gradient.dtype == torch.float32
        assert gradient.abs().sum() > 0, name


def test_autocast_casts_mixed_dtypes_but_not_float64() -> None:
    query, key, value = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 7, 8).bfloat16(), torch.randn(2, 2, 7, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.ops.scaledot.sdpa(query, key, value)[0].dtype == torch.bfloat16
        wide = torch.ops.scaledot.sdpa(query.double(), key.double(), value.double())[0]
    assert (
        wide.dtype
        == torch.nn.functional.scaled_dot_product_attention(query.double(), key.double(), value.double()).dtype
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert torch.ops.scaledot.sdpa(query, query, query)[0].dtype == torch.float32


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
    return scaledot.scaled_dot_product_attention(query, key, value, mask, **options)


COMPILED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True, "causal_alignment": "lower_right"},
    "weights": {"return_weights": True, "return_lse": True},
    "window": {"window": (4, 1), "softcap": 3.0, "scale": 0.4},
    "dropout": {"dropout_p": 0.3, "return_weights": True},
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_compile_fullgraph(name: str, dynamic: bool) -> None:
    """Forward and backward have the bits of the plain function, with dropout too."""
    torch._dynamo.reset()
    options = COMPILED[name]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for query_length in (9, 12):
        inputs = (
            Case("compile", mask="float", mask_shape="QK", query_length=query_length, key_length=11)
            .make()
            .requiring_grad()
        )
        found = []
        for function in (attend, compiled):
            torch.manual_seed(4)
            result = function(inputs.query, inputs.key, inputs.value, inputs.attn_mask, **options)
            tensors = result if isinstance(result, tuple) else (result,)
            gradients = torch.autograd.grad(
                sum(t.square().sum() for t in tensors), list(inputs.differentiable().values())
            )
            found.append([*tensors, *gradients])
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)


def test_compiled_dropout_draws_again_on_every_call() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    inputs = Case("compiled dropout").make()
    first, second = (compiled(inputs.query, inputs.key, inputs.value, None, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)


def test_export_keeps_the_op() -> None:
    class Attention(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            result: Tensor = scaledot.scaled_dot_product_attention(query, key, value, is_causal=True)
            return result

    inputs = Case("export").make()
    arguments = (inputs.query.clone(), inputs.key.clone(), inputs.value.clone())
    program = torch.export.export(Attention(), arguments)
    assert any("scaledot.sdpa" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(*arguments), Attention()(*arguments))


def test_results_can_be_pickled_and_copied() -> None:
    case = Case("ordinary", return_weights=True)
    inputs = case.make()
    for result in sdpa(case, inputs):
        assert torch.equal(pickle.loads(pickle.dumps(result)), result)
        assert torch.equal(copy.deepcopy(result), result)


def test_the_default_dtype_changes_nothing() -> None:
    case = Case("default dtype", mask="bool", alibi="H", return_weights=True)
    inputs = case.make()
    wanted = sdpa(case, inputs)
    torch.set_default_dtype(torch.float64)
    for found, want in zip(sdpa(case, inputs), wanted, strict=True):
        assert found.dtype == want.dtype
        assert torch.equal(found, want)


@pytest.mark.parametrize("name", ["plain-float32", "everything-float32", "blhd-bfloat16"])
def test_inputs_are_not_written(name: str, kernel: str) -> None:
    case = BY_NAME[name]
    inputs = case.make()
    before = inputs.mapped(lambda t: t.clone())
    results_and_gradients(case, inputs)
    for key, tensor in inputs.tensors().items():
        if tensor is not None:
            assert torch.equal(tensor, getattr(before, key)), key
