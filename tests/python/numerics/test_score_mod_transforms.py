"""score_mod gives the same with any number of threads, compiled, exported, under vmap, and at large positions."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import scaledot
from score_mod_cases import FUNCTIONS, Captured, inputs


def captured_case() -> tuple[list[Tensor], Callable[..., Tensor], list[Tensor]]:
    """A call with a full table, which one task sums, and small ones, of which each task has its own sums."""
    generator = torch.Generator().manual_seed(4)
    tensors = [torch.randn(3, 4, 200, 16, generator=generator).requires_grad_() for _ in range(3)]
    gate, full = torch.tensor(1.2, requires_grad=True), torch.randn(4, 200, 200, generator=generator).requires_grad_()
    distance = torch.randn(399, generator=generator).requires_grad_()

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * gate + full[h, q, k] + distance[k - q + 199]

    return tensors, score_mod, [*tensors, gate, full, distance]


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    tensors, score_mod, leaves = captured_case()
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            output = scaledot.scaled_dot_product_attention(*tensors, score_mod=score_mod)
            found.append([output, *torch.autograd.grad(output.sin().sum(), leaves)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_compiled_in_one_graph(name: str) -> None:
    tensors, captured = inputs(torch.float32), Captured(torch.float32)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaledot.scaled_dot_product_attention(query, key, value, score_mod=FUNCTIONS[name](captured))

    torch._dynamo.reset()
    found = []
    for function in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        output = function(*tensors)
        found.append([output, *torch.autograd.grad(output.sum(), tensors + captured.floating(), allow_unused=True)])
    for eager, compiled in zip(*found, strict=True):
        assert (eager is None) is (compiled is None)
        assert eager is None or torch.equal(eager, compiled)


def _without_gradients(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    with torch.no_grad():
        return s * 2


# Where Python would take a recorder for true, or for a sequence without an end.
READS = "score_mod: got a function that reads the number in a tensor; needs operations on tensors, such as torch.where"
REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "if": (lambda s, b, h, q, k: s if q > k else -s, READS),
    "not": (lambda s, b, h, q, k: s * (not q), READS),
    "in": (lambda s, b, h, q, k: s if h in (1, 2) else -s, READS),
    "a chain": (lambda s, b, h, q, k: torch.where(0 <= q <= k, s, -s), READS),
    "sum": (lambda s, b, h, q, k: sum(s), READS),
    "requires_grad": (
        lambda s, b, h, q, k: s if s.requires_grad else -s,
        "score_mod: got requires_grad under torch.compile; needs operations of torch",
    ),
    "no_grad": (
        _without_gradients,
        "score_mod: got torch.no_grad(); needs all parts with their gradients, or a captured tensor that is detached "
        "before it is indexed",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_compiled_python_that_reads_numbers_is_refused(name: str) -> None:
    score_mod, message = REFUSED[name]
    torch._dynamo.reset()
    compiled = torch.compile(scaledot.scaled_dot_product_attention, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=re.escape(message)):
        compiled(*inputs(torch.float32), score_mod=score_mod)


def test_compiled_shapes_of_scalars() -> None:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        plain = s.shape == () and s.size() == () and s.ndim == s.dim() == 0 and s.numel() == 1
        return s * 2 if plain else s

    torch._dynamo.reset()
    compiled = torch.compile(scaledot.scaled_dot_product_attention, backend="eager", fullgraph=True)
    tensors = [tensor.detach() for tensor in inputs(torch.float32)]
    wanted = scaledot.scaled_dot_product_attention(*tensors, score_mod=lambda s, b, h, q, k: s * 2)
    assert torch.equal(compiled(*tensors, score_mod=score_mod), wanted)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.rand(4))

    def forward(self, query: Tensor) -> Tensor:
        def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s - self.slopes[h] * (q - k).abs()

        return scaledot.scaled_dot_product_attention(query, query, query, score_mod=score_mod)


def test_exported() -> None:
    module, query = Attention(), torch.randn(2, 4, 20, 16)
    program = torch.export.export(module, (query,)).module()
    assert torch.equal(program(query), module(query))


def test_exported_functions_may_not_read_a_number() -> None:
    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.tensor(1.5))

        def forward(self, query: Tensor) -> Tensor:
            return scaledot.scaled_dot_product_attention(
                query, query, query, score_mod=lambda s, b, h, q, k: s * self.factor.item()
            )

    with pytest.raises(NotImplementedError) as raised:
        torch.export.export(Reads(), (torch.randn(2, 4, 20, 16),))
    assert str(raised.value) == f"{READS} in place of if, or a number that is read before the call"


@pytest.mark.parametrize("name", ["relative", "document", "dilated", "full table", "mixed"])
def test_large_positions_are_computed_as_integers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They give the numbers that small ones give as floating numbers."""
    tensors, captured = inputs(torch.float32), Captured(torch.float32)
    wanted = scaledot.scaled_dot_product_attention(*tensors, score_mod=FUNCTIONS[name](captured))
    monkeypatch.setattr("scaledot._score.arguments.SMALL", 0)
    found = scaledot.scaled_dot_product_attention(*tensors, score_mod=FUNCTIONS[name](captured))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_vmap_over_the_batch() -> None:
    captured = Captured(torch.float32)
    queries = torch.randn(3, 2, 4, 37, 16)

    def attend(query: Tensor) -> Tensor:
        score_mod = lambda s, b, h, q, k: s + captured.by_row.detach()[b]  # noqa: E731
        return scaledot.scaled_dot_product_attention(query, query, query, score_mod=score_mod)

    assert torch.equal(torch.vmap(attend)(queries), torch.stack([attend(query) for query in queries]))
