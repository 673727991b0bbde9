"""torch.compile over packed sequences: one graph, compiled once for all lengths and numbers of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import scaledot
from varlen_cases import cumulative

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
attend: Any = scaledot.varlen_attention
# The sequence lengths of each call. All sizes of the first call differ (3 + 1 bounds, 17 rows, 6 heads): torch would
# treat equal sizes as one symbol.
LENGTHS = ((3, 5, 9), (4, 1, 0, 7, 8), (6, 2), (30, 1, 4, 11))


@pytest.fixture(autouse=True)
def strict_dynamo() -> Iterator[None]:
    """A second compilation is an error. Inductor draws the same random numbers as eager."""
    torch._dynamo.reset()
    with (
        torch._dynamo.config.patch(error_on_recompile=True),
        torch._inductor.config.patch(fallback_random=True, compile_threads=1),
    ):
        yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: str = "inductor") -> Any:
    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend)


def everything(query: Tensor, key: Tensor, value: Tensor, cu_seq: Tensor, longest: int, slopes: Tensor) -> Any:
    return attend(
        query, key, value, cu_seq, cu_seq, longest, longest, True, scale=0.4, enable_gqa=True, dropout_p=0.3,
        window=(6, None), softcap=3.0, alibi_slopes=slopes, seqused_k=cu_seq.diff() - (cu_seq.diff() > 2).int(),
        return_lse=True,
    )  # fmt: skip


def solve(function: Any, lengths: tuple[int, ...]) -> list[Tensor]:
    """Results and gradients for fixed cotangents and a fixed seed."""
    torch.manual_seed(4)
    query, key, value = (torch.randn(sum(lengths), h, 8, requires_grad=True) for h in (6, 2, 2))
    results = function(query, key, value, cumulative(lengths), max(lengths), torch.linspace(0.1, 0.4, 6))
    cotangents = [torch.linspace(-1, 1, t.numel()).view(t.shape) for t in results]
    return [*results, *torch.autograd.grad(results, (query, key, value), cotangents)]


def test_inductor_has_the_bits_of_eager_with_every_option() -> None:
    """The results have the bits of eager's, also those of dropout in the compiled backward."""
    fast = compiled(everything)
    for lengths in LENGTHS:
        for mine, right in zip(solve(fast, lengths), solve(everything, lengths), strict=True):
            assert torch.equal(mine, right)


def test_default_compile_compiles_twice_for_all_lengths() -> None:
    """Without dynamic=True, torch compiles once for the first lengths and once for all others."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=False):
        fast = torch.compile(everything, fullgraph=True, backend=counter)
        for lengths in LENGTHS:
            for mine, right in zip(solve(fast, lengths), solve(everything, lengths), strict=True):
                assert torch.equal(mine, right)
    assert counter.frame_count <= 2


class Block(nn.Module):
    """An attention block as in a model that is trained on packed documents."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, cu_seq: Tensor, longest: int) -> Tensor:
        fused = self.qkv(x).unflatten(-1, (3, 2, 8))
        attended = attend(*fused.unbind(1), cu_seq, cu_seq, longest, longest, True, dropout_p=0.2)
        result: Tensor = x + self.out(attended.flatten(1))
        return result


def gradients(block: nn.Module, run: Callable[..., Tensor], lengths: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(6)
    x = torch.randn(sum(lengths), 16, requires_grad=True)
    block.zero_grad()
    run(x, cumulative(lengths), max(lengths)).square().sum().backward()
    found = [t.grad for t in (x, *block.parameters()) if t.grad is not None]
    assert len(found) == 5
    return found


def test_inductor_gives_the_gradients_of_eager() -> None:
    block = Block()
    fast = compiled(block)
    for lengths in LENGTHS:
        for mine, right in zip(gradients(block, fast, lengths), gradients(block, block, lengths), strict=True):
            torch.testing.assert_close(mine, right, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_replays_dropout(reentrant: bool) -> None:
    block = Block()

    def checkpointed(*arguments: Any) -> Tensor:
        result: Tensor = checkpoint(block, *arguments, use_reentrant=reentrant)
        return result

    for mine, right in zip(gradients(block, checkpointed, (4, 7)), gradients(block, block, (4, 7)), strict=True):
        assert torch.equal(mine, right)


def test_checkpoint_inside_torch_compile() -> None:
    """The recomputed forward draws the seed of the first forward. The check uses that output is linear in value."""
    query, value = torch.randn(9, 2, 8), torch.randn(9, 2, 8, requires_grad=True)
    cu_seq = cumulative((4, 5))

    def block(query: Tensor, value: Tensor) -> Any:
        return attend(query, query, value, cu_seq, cu_seq, 5, 5, dropout_p=0.5)

    def checkpointed(query: Tensor, value: Tensor) -> Any:
        return checkpoint(block, query, value, use_reentrant=False)

    output = torch.compile(checkpointed, fullgraph=True, backend="aot_eager_decomp_partition")(query, value)
    cotangent = torch.randn_like(output)
    (found,) = torch.autograd.grad(output, value, cotangent)
    torch.testing.assert_close((found * value).sum(), (output * cotangent).sum())
    assert not torch.equal(output, attend(query, query, value, cu_seq, cu_seq, 5, 5))


@pytest.mark.parametrize("transform", ["grad", "vmap", "per sample"])
def test_compiled_transforms_are_those_of_eager(transform: str) -> None:
    cu_seq = cumulative((2, 3))

    def loss(query: Tensor, key: Tensor) -> Tensor:
        result: Tensor = attend(query, key, key, cu_seq, cu_seq, 3, 3, True).square().sum()
        return result

    apply: dict[str, Any] = {
        "grad": torch.func.grad(loss, argnums=(0, 1)),
        "vmap": torch.vmap(lambda q, k: attend(q, k, k, cu_seq, cu_seq, 3, 3, softcap=3.0), in_dims=(0, None)),
        "per sample": torch.vmap(torch.func.grad(loss), in_dims=(0, None)),
    }
    function = apply[transform]
    fast = torch.compile(function, fullgraph=True, backend="aot_eager")
    query, key = torch.randn(*(() if transform == "grad" else (3,)), 5, 2, 8), torch.randn(5, 2, 8)
    torch.testing.assert_close(fast(query, key), function(query, key))


def test_forward_mode_breaks_the_graph_to_read_the_lengths() -> None:
    """Tracers do not know the lengths, so the graph breaks. With fullgraph, the error of torch names the call."""
    query, cu_seq = torch.randn(5, 2, 8), cumulative((2, 3))

    def derivative(query: Tensor) -> Any:
        return torch.func.jvp(lambda q: attend(q, q, q, cu_seq, cu_seq, 3, 3), (query,), (query.cos(),))

    torch.testing.assert_close(torch.compile(derivative, backend="aot_eager")(query), derivative(query))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.UserError, match=r"data-dependent expression [\s\S]*in varlen_attention"):
        torch.compile(derivative, fullgraph=True, backend="aot_eager")(query)


def test_export_for_any_lengths() -> None:
    """The exported program runs for other lengths and numbers of sequences, and is differentiable."""

    class Attention(nn.Module):
        def forward(self, query: Tensor, key: Tensor, cu_q: Tensor, cu_k: Tensor) -> Any:
            return attend(query, key, key, cu_q, cu_k, 64, 64, True, softcap=5.0, return_lse=True)

    def inputs(rows: tuple[int, ...], keys: tuple[int, ...]) -> tuple[Tensor, ...]:
        return torch.randn(sum(rows), 2, 8), torch.randn(sum(keys), 2, 8), cumulative(rows), cumulative(keys)

    total_q, total_k, ends = (torch.export.Dim(name, min=2, max=4096) for name in ("total_q", "total_k", "ends"))
    shapes = ({0: total_q}, {0: total_k}, {0: ends}, {0: ends})
    program = torch.export.export(Attention(), inputs((4, 5), (6, 7)), dynamic_shapes=shapes)
    assert [str(n.target) for n in program.graph.nodes if "scaledot" in str(n.target)] == ["scaledot.varlen.default"]
    for rows, keys in (((4, 5), (6, 7)), ((1, 20, 0, 3), (9, 20, 3, 2))):
        given = inputs(rows, keys)
        for mine, right in zip(program.module()(*given), Attention()(*given), strict=True):
            assert torch.equal(mine, right)
        query = given[0].requires_grad_()
        found, wanted = (
            torch.autograd.grad(f(*given)[0].square().sum(), query)[0] for f in (program.module(), Attention())
        )
        assert torch.equal(found, wanted)
