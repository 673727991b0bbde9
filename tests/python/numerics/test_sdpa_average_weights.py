"""average_weights: the mean of the weights over the heads, computed without storing the weights of each head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from case_list import CASES
from cases import Case
from kernels_under_test import pairs, sdpa
from scaledot.functional import attention_with_average_weights
from tolerances import largest

WITH_HEADS = [case.with_(return_weights=True) for case in CASES if case.heads is not None]
# With many keys, P is recomputed instead of kept. With many rows, the last row tiles are smaller.
LONG = [
    Case("many keys", batch=(), heads=2, query_length=3, key_length=6000, head_dim=8, return_weights=True),
    Case("many rows", batch=(), heads=3, query_length=700, key_length=40, head_dim=8, return_weights=True),
    Case("many heads", batch=(40,), heads=4, kv_heads=2, query_length=5, key_length=9, return_weights=True).with_(
        enable_gqa=True
    ),
]


def averaged(case: Case, inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.scaledot.sdpa(
        **inputs.tensors(), **case.options(), return_weights=True, average_weights=True
    )
    return result


@pytest.mark.parametrize(("case", "kernel"), pairs(WITH_HEADS + LONG, ("forward",)), indirect=["kernel"])
def test_averaged_weights_are_the_mean_of_the_weights(case: Case, kernel: str) -> None:
    inputs = case.make()
    output, lse, weights = sdpa(case, inputs)
    found_output, found_lse, found = averaged(case, inputs)
    torch.testing.assert_close((found_output, found_lse), (output, lse), rtol=0, atol=0, equal_nan=True)
    mean = weights.double().mean(-3)
    assert found.dtype == weights.dtype
    assert torch.equal(found.isfinite(), mean.isfinite())
    # Half an ulp for the weight of each head, half an ulp for the mean. Heads are summed in float32 or float64.
    eps, wide = torch.finfo(weights.dtype).eps, torch.finfo(lse.dtype).eps
    error = (found.double() - mean).nan_to_num(0, 0, 0).abs()
    assert largest(error) <= (eps + (weights.size(-3) + 1) * wide) * largest(weights.nan_to_num(0, 0, 0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_gradients_are_those_of_the_mean(dtype: str, kernel: str) -> None:
    case = Case("mean", mask="float", dropout_p=0.3, causal=True, kv_heads=1, enable_gqa=True, heads=4, dtype=dtype)
    grads = []
    for average in (False, True):
        inputs = case.make().requiring_grad()
        output, _, weights = averaged(case, inputs) if average else sdpa(case, inputs, return_weights=True)
        mean = weights if average else weights.mean(-3)
        torch.manual_seed(1)
        loss = (mean * torch.randn_like(mean)).sum() + (output * torch.randn_like(output)).sum()
        grads.append(torch.autograd.grad(loss, list(inputs.differentiable().values())))
    for expected, found in zip(*grads, strict=True):
        assert torch.equal(found, expected)


def call(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return attention_with_average_weights(query, key, value)


def small(*batch: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(*batch, 2, length, 4, dtype=dtype, requires_grad=True) for length in (3, 5, 5)]


def test_first_and_second_derivatives() -> None:
    inputs = small()
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_vmap_gives_each_sample_what_it_gets_alone() -> None:
    inputs = [t.detach() for t in small(3)]
    output, weights = torch.vmap(call)(*inputs)
    for k in range(3):
        one = call(*(t[k] for t in inputs))
        torch.testing.assert_close((output[k], weights[k]), one, rtol=0, atol=0)


def test_compiled_gradients_are_those_of_eager() -> None:
    def loss(*tensors: Tensor) -> Tensor:
        output, weights = call(*tensors)
        return output.square().sum() + weights.square().sum()

    torch._dynamo.reset()
    inputs = small(2, dtype=torch.float32)
    eager = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, dynamic=True)(*inputs), inputs)
    torch.testing.assert_close(compiled, eager)


def test_autocast_and_meta_tensors() -> None:
    inputs = small(2, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(*inputs)[1].dtype == torch.bfloat16
    output, weights = call(*(t.to("meta") for t in inputs))
    assert output.shape == (2, 2, 3, 4)
    assert weights.shape == (2, 3, 5)


def test_no_keys_and_no_heads() -> None:
    query, key = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 0, 8)
    assert call(query, key, key)[1].shape == (2, 4, 0)
    assert call(query[:, :0], query[:, :0], query[:, :0])[1].equal(torch.zeros(2, 4, 4))


def test_bad_arguments() -> None:
    query = torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match="average_weights: got True without return_weights"):
        torch.ops.scaledot.sdpa(query, query, query, average_weights=True)
    with pytest.raises(ValueError, match="average_weights: got 2-D inputs; needs a dimension of heads"):
        call(query[0], query[0], query[0])


def test_the_weights_of_each_head_are_never_allocated() -> None:
    heads, length = 16, 512
    tensors = [torch.randn(1, heads, length, 8) for _ in range(3)]
    with torch.profiler.profile(profile_memory=True) as profile:
        call(*tensors)
    taken = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert length * length * 4 <= taken < heads * length * length * 4 / 2
