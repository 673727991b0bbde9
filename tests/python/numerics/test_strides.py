"""The bits of results and gradients depend on the values of tensors, not on their strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import eager
import scaledot
from case_list import BY_NAME
from cases import Case, Cotangents
from kernels_under_test import GENERAL, sdpa
from layouts import LAYOUTS, place
from varlen_cases import Packed, call, pack

CASES = [
    *[BY_NAME[f"{name}-{dtype}"] for name in ("plain", "everything", "weights") for dtype in ("float32", "bfloat16")],
    *[BY_NAME[name] for name in ("gqa-float16", "bias-float64", "dropout-float32", "2d-float32", "causal-bfloat16")],
    Case("many keys", query_length=70, key_length=300, head_dim=40, value_dim=56, mask="float", dtype="bfloat16"),
    Case("saved softmax", query_length=70, key_length=150, head_dim=64, value_dim=72, dropout_p=0.2),
    Case("one row", query_length=1, key_length=300, head_dim=64, return_weights=True),
]  # fmt: skip
NAMES = [case.name for case in CASES]


def contiguous(layout: str, tensor: Tensor | None) -> Tensor | None:
    """The values that the tensor has once it is placed: expanded layouts repeat a slice."""
    return None if tensor is None else place(tensor, layout).contiguous()


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
@pytest.mark.parametrize("kernel", GENERAL, indirect=True)
def test_incoming_gradients(case: Case, layout: str, kernel: str) -> None:
    inputs, given = case.make().requiring_grad(), vars(case.cotangents()).values()
    wanted, found = (
        eager.gradients(sdpa(case, inputs), Cotangents(*cotangents), inputs.differentiable())
        for cotangents in (
            [contiguous(layout, t) for t in given],
            [None if t is None else place(t, layout) for t in given],
        )
    )
    assert_equal(found, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", "all"])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
@pytest.mark.parametrize("kernel", GENERAL, indirect=True)
def test_inputs(case: Case, name: str, layout: str, kernel: str) -> None:
    made, outcomes = case.make(), []
    for placed in (False, True):
        inputs = made.mapped(lambda t: t)
        for field in ("query", "key", "value", "attn_mask") if name == "all" else (name,):
            tensor = getattr(made, field)
            if tensor is not None:
                setattr(inputs, field, place(tensor, layout) if placed else contiguous(layout, tensor))
        inputs = inputs.requiring_grad()
        results = sdpa(case, inputs)
        gradients = eager.gradients(results, case.cotangents(), inputs.differentiable())
        outcomes.append({**dict(zip(("output", "lse", "weights"), results, strict=True)), **gradients})
    assert_equal(*outcomes)


@pytest.mark.parametrize("layout", ["inner2", "transposed", "expanded_cols", "expanded_rows"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_sequences(dtype: str, layout: str) -> None:
    made = call(Packed("strides").with_(dtype=dtype, head_dim=40, value_dim=24))
    given = pack([c.output for c in made.packed.cotangents() if c.output is not None])
    leaves = [made.query, made.key, made.value]
    wanted, found = (
        torch.autograd.grad(made.run()[0], leaves, cotangent)
        for cotangent in (contiguous(layout, given), place(given, layout))
    )
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", ["sum", "ones", "column", "transposed"])
def test_compiled_gradients_are_eagers(kind: str, backend: str) -> None:
    """Eager hands the gradient of a sum to the backward expanded, a compiled graph makes it contiguous."""
    torch._dynamo.reset()
    shape = (1, 2, 130, 64)
    query, key, value = torch.randn(3, *shape).unbind()
    given = {
        "ones": torch.ones(shape),
        "column": torch.randn(1, 2, 130, 1).expand(shape),
        "transposed": torch.randn(1, 2, 64, 130).mT,
    }

    def attention(*tensors: Tensor) -> Any:
        return scaledot.scaled_dot_product_attention(*tensors, is_causal=True)

    def gradients(function: Any) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (query, key, value)]
        output = function(*leaves)
        if kind == "sum":
            return list(torch.autograd.grad(output.sum(), leaves))
        return list(torch.autograd.grad(output, leaves, given[kind]))

    wanted = gradients(attention)
    assert all(map(torch.equal, gradients(torch.compile(attention, backend=backend)), wanted))
    if kind == "sum":
        assert all(map(torch.equal, gradients(lambda *tensors: attention(*tensors) * 1), wanted))
