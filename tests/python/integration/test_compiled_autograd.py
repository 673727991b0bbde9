"""Compiled autograd: torch traces and compiles the backward of the graph that eager code recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

import scaledot
from varlen_cases import cumulative

attend: Any = scaledot.scaled_dot_product_attention
LENGTHS = (9, 14, 21)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_traced(gradients: Any, node: str) -> None:
    """The compiled gradients have the same bits, from one compilation for the first length and one for all others."""
    wanted = [gradients(length) for length in LENGTHS]
    graphs = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module

    with compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True), dynamic=True):
        found = [gradients(length) for length in LENGTHS]
    for mine, right in zip(found, wanted, strict=True):
        assert len(mine) == 3
        for a, b in zip(mine, right, strict=True):
            assert torch.equal(a, b)
    assert len(graphs) <= 2
    assert any(node in str(n.target) for n in graphs[0].graph.nodes)


@pytest.mark.parametrize(
    "options", [{}, {"dropout_p": 0.4, "window": (3, 1), "softcap": 2.0}], ids=["plain", "options"]
)
def test_compiled_autograd(options: dict[str, Any]) -> None:
    def gradients(length: int) -> list[Tensor]:
        torch.manual_seed(length)
        query, key, bias = torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8), torch.randn(2, length, length)
        leaves = [t.requires_grad_() for t in (query, key, bias)]
        output, weights, lse = attend(query, key, key, bias, **options, return_weights=True, return_lse=True)
        (output.sum() + weights.square().sum() + lse.sum()).backward()
        return [t.grad for t in leaves if t.grad is not None]

    assert_traced(gradients, "ScaledotSdpaBackward")


@pytest.mark.parametrize(
    "options",
    [{}, {"dropout_p": 0.4, "window": (3, 1), "softcap": 2.0, "num_splits": 2}, {"seqused_k": torch.tensor([2, 0, 5])}],
    ids=["plain", "options", "seqused_k"],
)
def test_compiled_autograd_of_packed_sequences(options: dict[str, Any]) -> None:
    """The lengths and their bounds differ between calls."""

    def gradients(length: int) -> list[Tensor]:
        torch.manual_seed(length)
        rows, keys = (length, 0, 3), (4, length, 7)
        query, key, value = (torch.randn(sum(n), 2, 8) for n in (rows, keys, keys))
        leaves = [t.requires_grad_() for t in (query, key, value)]
        bounds = (cumulative(rows), cumulative(keys), length, length)
        output, lse = scaledot.varlen_attention(query, key, value, *bounds, return_lse=True, **options)
        (output.square().sum() + lse[:, : length].sum()).backward()
        return [t.grad for t in leaves if t.grad is not None]

    assert_traced(gradients, "ScaledotVarlenBackward")


def test_double_backward_is_the_error_of_torch() -> None:
    """The double backward runs the autograd engine, which compiled autograd does not allow."""
    query = torch.randn(2, 2, 5, 8, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(attend(query, query, query).square().sum(), query, create_graph=True)
    with (
        compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(NotImplementedError, match="compiled_args not implemented: ScaledotSdpaBackwardBackward"),
    ):
        first.square().sum().backward()


def test_double_backward_of_packed_sequences_is_the_error_of_torch() -> None:
    query, cu_seq = torch.randn(5, 2, 8, dtype=torch.float64, requires_grad=True), cumulative((2, 3))
    output = scaledot.varlen_attention(query, query, query, cu_seq, cu_seq, 3, 3)
    (first,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    with (
        compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(NotImplementedError, match="compiled_args not implemented: ScaledotVarlenBackwardBackward"),
    ):
        first.square().sum().backward()


def test_a_compiled_training_step_gives_the_gradients_of_eager() -> None:
    """torch.compile of a function that calls backward()."""
    layer = scaledot.MultiHeadAttention(16, 2)

    def step(x: Tensor) -> None:
        layer(x, is_causal=True)[0].square().sum().backward()

    x = torch.randn(2, 9, 16)
    step(x)
    wanted = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")(x)
    for parameter, right in zip(layer.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, right)
