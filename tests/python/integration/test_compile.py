"""torch.compile of the function, the modules and the drop-ins: one graph, one compilation for all lengths, and the
results of eager. The backend is inductor if it generates kernels around the op, otherwise aot_eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import scaledot
from scaledot.dropin import config_mha, self_attention, split_heads, steps, torch_nn
from scaledot.dropin import sdpa as dropin_sdpa
from scaledot.dropin import transformers as dropin_transformers

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
attend: Any = scaledot.scaled_dot_product_attention
LENGTHS = (9, 14, 21)


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


def results(returned: Any) -> list[Tensor]:
    return [t for t in (returned if isinstance(returned, tuple) else (returned,)) if isinstance(t, Tensor)]


def solve(function: Callable[..., Any], inputs: list[Tensor], parameters: list[Tensor]) -> list[list[Tensor]]:
    """Results and gradients, for a fixed seed."""
    torch.manual_seed(4)
    leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs]
    returned = results(function(*leaves))
    wanted = [t for t in leaves if t.requires_grad] + parameters
    loss = sum((t * t).sum() for t in returned)
    assert isinstance(loss, Tensor)
    return [[t.detach() for t in returned], list(torch.autograd.grad(loss, wanted))]


def assert_as_eager(function: Any, fast: Any, inputs: list[Tensor]) -> None:
    """The op gives the same bits, but the code that inductor generates around it may round differently."""
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    (eager, eager_grads), (found, found_grads) = (solve(f, inputs, parameters) for f in (function, fast))
    assert len(found) == len(eager)
    for mine, right in zip(found + found_grads, eager + eager_grads, strict=True):
        torch.testing.assert_close(mine, right, rtol=2e-5, atol=2e-5)


def everything(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, slopes: Tensor) -> Any:
    return attend(
        query, key, value, bias, 0.3, is_causal=True, scale=0.4, enable_gqa=True, causal_alignment="lower_right",
        window=(6, None), softcap=3.0, alibi_slopes=slopes.detach(), return_weights=True, return_lse=True,
    )  # fmt: skip


def boolean(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Any:
    return attend(query, key, value, allowed, masked_score=-5.0, return_lse=True)


@pytest.mark.parametrize("name", ["everything", "boolean"])
def test_function_with_inductor(name: str) -> None:
    """Forward and backward have the bits of eager, so the compiled backward drops what the compiled forward dropped."""
    function: Any = {"everything": everything, "boolean": boolean}[name]
    fast = compiled(function)
    for length in LENGTHS:
        query = torch.randn(2, 4, length, 8)
        key, value = torch.randn(2, 2, length + 3, 8), torch.randn(2, 2, length + 3, 6)
        if name == "everything":
            inputs = [query, key, value, torch.randn(4, length, length + 3), torch.rand(4)]
        else:
            inputs = [query, key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1), torch.rand(length, length + 3) < 0.7]
        for mine, right in zip(solve_bits(fast, inputs), solve_bits(function, inputs), strict=True):
            assert torch.equal(mine, right)


def solve_bits(function: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Like solve, but with fixed cotangents, so that the op does all arithmetic."""
    torch.manual_seed(4)
    leaves = [t.detach().requires_grad_() if t.is_floating_point() and t.dim() > 1 else t for t in inputs]
    returned = results(function(*leaves))
    cotangents = [torch.linspace(-1, 1, t.numel()).view(t.shape) for t in returned]
    return [*returned, *torch.autograd.grad(returned, [t for t in leaves if t.requires_grad], cotangents)]


def test_dropout_with_the_generator_of_inductor() -> None:
    """By default inductor draws other seeds than eager. The backward must use the seeds of its forward."""

    def weighted(query: Tensor, value: Tensor) -> Any:
        return attend(query.sin(), query, value, dropout_p=0.5, return_weights=True)

    with torch._inductor.config.patch(fallback_random=False):
        fast = torch.compile(weighted, fullgraph=True)
        query, value = torch.randn(2, 4, 16, 8), torch.randn(2, 4, 16, 8, requires_grad=True)
        seen = []
        for _ in range(2):
            output, weights = fast(query, value)
            (grad,) = torch.autograd.grad(output, value, torch.ones_like(output))
            assert 0.3 < (weights == 0).float().mean() < 0.7
            torch.testing.assert_close(output, weights @ value)
            torch.testing.assert_close(grad, weights.sum(-2)[..., None].expand_as(grad))
            seen.append(weights)
        assert not torch.equal(*seen)


def _packed_dropout(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    lengths = torch.tensor([0, 20, 64])
    tokens = [t.squeeze(0).transpose(0, 1) for t in (query, key, value)]
    return scaledot.varlen_attention(*tokens, lengths, lengths, 44, 44, dropout_p=0.5)


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", "inductor"])
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("budget", [0.5, 0.01])
def test_the_backward_drops_the_same_with_a_memory_budget(budget: float, packs: bool, backend: str) -> None:
    """The output is linear in value: <its gradient, value> is <grad_output, output> if the same weights are dropped."""
    attention = _packed_dropout if packs else lambda q, k, v: attend(q, k, v, dropout_p=0.5)
    x, key, value = torch.randn(3, 1, 2, 64, 16, dtype=torch.float64).unbind()
    x.requires_grad_()
    value.requires_grad_()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        fast = compiled(lambda x, v: attention((torch.relu(x) * 1.5).sin(), key, v), backend)
        output = fast(x, value)
        grad_output = torch.randn_like(output)
        (grad_value,) = torch.autograd.grad(output, value, grad_output)
    assert torch.allclose((grad_value * value).sum(), (grad_output * output).sum())


def test_dropout_names_a_memory_budget_of_zero() -> None:
    query = torch.randn(1, 2, 8, 4, requires_grad=True)
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        with pytest.raises(Exception, match=r"dropout_p: got .*activation_memory_budget = 0"):
            compiled(lambda q: attend(q.sin(), q, q, dropout_p=0.5))(query)
        assert compiled(lambda q: attend(q.sin(), q, q))(query).shape == query.shape


def test_module_with_inductor() -> None:
    layer = scaledot.MultiHeadAttention(32, 4, num_kv_heads=2, dropout=0.2)

    def forward(x: Tensor, key_mask: Tensor) -> Any:
        return layer(x, key_mask=key_mask, is_causal=True, window=(5, 0), need_weights=True)

    fast = compiled(forward)
    for length in LENGTHS:
        key_mask = torch.arange(length) < torch.tensor([[length], [length - 2]])
        assert_as_eager(forward, fast, [torch.randn(2, length, 32), key_mask])


class DropIns(nn.Module):
    """The teaching drop-ins and torch_nn in sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first = config_mha.MultiHeadAttention({"d_model": 16, "num_heads": 2})
        self.second = self_attention.MultiHeadAttention(16, 2, 0.1)
        self.third = split_heads.SplitHeadAttention(16, 16, 2)
        self.fourth = torch_nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.fifth = self_attention.SelfAttentionV2(16, 8, 8, 0.1)

    def forward(self, x: Tensor, padding: Tensor) -> Any:
        x = self.first(x, x, x).hidden_states
        x, _ = self.second(x, attention_mask=~padding)
        x = self.third(x)
        x, weights = self.fourth(x, x, x, key_padding_mask=padding)
        x = self.fifth(x)
        causal = steps.create_causal_mask(x.size(1))
        return (*steps.scaled_dot_product_attention(x, x, x, causal), weights)


def test_drop_ins_with_inductor() -> None:
    model = DropIns()
    fast = compiled(model)
    for length in LENGTHS:
        padding = torch.arange(length) >= torch.tensor([[length], [length - 2]])
        assert_as_eager(model, fast, [torch.randn(2, length, 16), padding])


# ------------------------------------------------------------------------------------------------ compilations


def packed(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """varlen_attention over one sequence."""
    length = query.size(-2)
    ends = torch.arange(2) * length
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    return scaledot.varlen_attention(*rows, ends, ends, length, length, **options)


def layer(kind: Any, training: bool, **options: Any) -> Callable[..., Any]:
    """The attention of heads that are taken for features, without weights where they can be left out."""
    module = kind(8, 2, **options).train(training)
    unasked = {"need_weights": False} if isinstance(module, nn.MultiheadAttention) else {}
    return lambda q, k, v: module(q[0], k[0], v[0], **unasked)[0]


def on_query(module: nn.Module) -> Callable[..., Any]:
    return lambda q, k, v: module(q)


# Ours and what it replaces. torch compiles its own twice where dropout is on, because a module's float is an input.
COMPILED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "default": (lambda q, k, v: attend(q, k, v), lambda q, k, v: F.scaled_dot_product_attention(q, k, v)),
    "the function itself": (attend, F.scaled_dot_product_attention),
    "dropout_p": (
        lambda q, k, v: attend(q, k, v, dropout_p=0.25),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.25),
    ),
    "no dropout_p": (
        lambda q, k, v: attend(q, k, v, dropout_p=0.0),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.0),
    ),
    "scale": (
        lambda q, k, v: attend(q, k, v, scale=0.3),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
    ),
    "softcap": (
        lambda q, k, v: attend(q, k, v, softcap=3.0, return_lse=True),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    ),
    "masked_score": (
        lambda q, k, v: attend(q, k, v, q[..., :1] < k[..., :1].mT, masked_score=-1e9),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, q[..., :1] < k[..., :1].mT),
    ),
    "varlen": (packed, lambda q, k, v: F.scaled_dot_product_attention(q, k, v)),
    "varlen dropout_p": (
        lambda q, k, v: packed(q, k, v, dropout_p=0.25, scale=0.3, softcap=3.0),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.25, scale=0.3),
    ),
    "varlen no dropout_p": (
        lambda q, k, v: packed(q, k, v, dropout_p=0.0),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.0),
    ),
    "module in training": (
        layer(scaledot.MultiHeadAttention, True),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    ),
    "module in eval": (
        layer(scaledot.MultiHeadAttention, False, dropout=0.1),
        layer(nn.MultiheadAttention, False, dropout=0.1),
    ),
    "module with dropout": (
        layer(scaledot.MultiHeadAttention, True, dropout=0.1),
        layer(nn.MultiheadAttention, True, dropout=0.1),
    ),
    "self_attention": (
        on_query(self_attention.SelfAttention(8, 6, 5)),
        layer(nn.MultiheadAttention, True),
    ),
    "self_attention in eval": (
        on_query(self_attention.SelfAttentionV2(8, 6, 5).eval()),
        layer(nn.MultiheadAttention, False),
    ),
    "steps": (
        lambda q, k, v: steps.scaled_dot_product_attention(q, k, v, q[..., :1] < k[..., :1].mT),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, q[..., :1] < k[..., :1].mT),
    ),
    "torch_nn in training": (layer(torch_nn.MultiheadAttention, True), layer(nn.MultiheadAttention, True)),
    "torch_nn in eval": (
        layer(torch_nn.MultiheadAttention, False, dropout=0.1),
        layer(nn.MultiheadAttention, False, dropout=0.1),
    ),
    "torch_nn with dropout": (
        layer(torch_nn.MultiheadAttention, True, dropout=0.1),
        layer(nn.MultiheadAttention, True, dropout=0.1),
    ),
}


def graphs_of(function: Callable[..., Any]) -> list[torch.fx.GraphModule]:
    """What torch.compile hands to its backend for three lengths. A second graph is a restart: recompiling is an error.

    aot_eager: torch restarts where AOTAutograd finds that a float among the inputs feeds no kernel.
    """
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for length in LENGTHS:
        fast(*torch.randn(3, 2, 2, length, 8).unbind())
    assert counter.frame_count == len(counter.graphs)
    return list(counter.graphs)


@pytest.mark.parametrize("name", COMPILED)
def test_constants_are_compiled_once(name: str) -> None:
    """A default or constant number is neither an input of the graph nor the reason for a second compilation."""
    ours, theirs = COMPILED[name]
    graphs = graphs_of(ours)
    assert len(graphs) <= len(graphs_of(theirs))
    if "with dropout" not in name and name != "torch_nn in training":
        assert len(graphs) == 1
    targets = {str(node.target) for node in graphs[-1].graph.nodes}
    assert "item" not in targets
    assert any(t.startswith(("scaledot.sdpa", "scaledot.varlen")) for t in targets)


def test_activated_constants_are_compiled_once() -> None:
    with dropin_sdpa.activate() as activation:
        graphs = graphs_of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.25, scale=0.3))
    assert activation.calls > 0
    assert len(graphs) == 1


# ------------------------------------------------------------------------------------------------ drop-ins


def test_activated_function_with_inductor() -> None:
    """F.scaled_dot_product_attention of unmodified code, and a torch.nn encoder that calls it."""

    def block(query: Tensor, key: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query.cos(), key, key, is_causal=True, dropout_p=0.2)

    with dropin_sdpa.activate() as activation:
        fast = compiled(block)
        for length in LENGTHS:
            assert_as_eager(block, fast, [torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8)])
    assert activation.calls > 0
    assert not activation.fallthrough


def test_compilations_follow_the_activation() -> None:
    """Torch's caches from earlier compilations of its function do not hide the activation or outlive it."""

    def call(query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, query, query)

    def compiled_targets() -> set[str]:
        graphs = []

        def keep(module: Any, inputs: Any) -> Any:
            graphs.append(module)
            return make_boxed_func(module.forward)

        torch._dynamo.reset()
        torch.compile(call, fullgraph=True, backend=aot_autograd(fw_compiler=keep))(torch.randn(2, 2, 5, 8))
        return {str(node.target) for node in graphs[0].graph.nodes}

    assert "scaledot.sdpa.default" not in compiled_targets()
    with dropin_sdpa.activate() as activation:
        assert "scaledot.sdpa.default" in compiled_targets()
    assert activation.calls > 0
    assert "scaledot.sdpa.default" not in compiled_targets()


def test_activated_encoder() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    with dropin_sdpa.activate() as activation:
        fast = compiled(layer, "aot_eager")
        for length in LENGTHS:
            assert_as_eager(layer, fast, [torch.randn(2, length, 16)])
    assert activation.calls > 0
    assert not activation.fallthrough


def test_converted_encoder() -> None:
    layer = torch_nn.convert(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True))
    fast = compiled(layer, "aot_eager")
    for length in LENGTHS:
        assert_as_eager(layer, fast, [torch.randn(2, length, 16)])


def test_transformers_attention() -> None:
    """The function that Hugging Face models call. test_dropin_transformers.py compiles whole models."""
    module = nn.Module()
    module.is_causal = True  # type: ignore[assignment]

    def call(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Any:
        return dropin_transformers.attention_forward(
            module, query, key, value, None, dropout=0.1, sliding_window=8, softcap=4.0, s_aux=sink,
            output_attentions=True,
        )  # fmt: skip

    fast = compiled(call, "aot_eager")
    for length in LENGTHS:
        query, key, value = torch.randn(2, 4, length, 8), torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8)
        assert_as_eager(call, fast, [query, key, value, torch.randn(4)])


# ------------------------------------------------------------------------------------------------ torch.func, compiled


@pytest.mark.parametrize("transform", ["grad", "vmap", "per sample", "jvp"])
def test_compiled_transforms_are_those_of_eager(transform: str) -> None:
    def loss(query: Tensor, key: Tensor) -> Tensor:
        result: Tensor = attend(query, key, key, is_causal=True).square().sum()
        return result

    apply: dict[str, Any] = {
        "grad": torch.func.grad(loss, argnums=(0, 1)),
        "vmap": torch.vmap(lambda q, k: attend(q, k, k, softcap=3.0), in_dims=(0, None)),
        "per sample": torch.vmap(torch.func.grad(loss), in_dims=(0, None)),
        "jvp": lambda q, k: torch.func.jvp(lambda q: attend(q, k, k), (q,), (q.cos(),)),
    }
    function = apply[transform]
    fast = torch.compile(function, fullgraph=True, backend="aot_eager")
    query, key = torch.randn(3, 2, 5, 8), torch.randn(2, 5, 8)
    torch.testing.assert_close(fast(query, key), function(query, key))


# ------------------------------------------------------------------------------------------------ checkpointing


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_replays_dropout(reentrant: bool) -> None:
    layer = scaledot.MultiHeadAttention(16, 2, dropout=0.5)
    x = torch.randn(2, 9, 16)

    def gradients(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(8)
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        torch.randn(3)
        call(leaf).square().sum().backward()
        assert leaf.grad is not None
        return [leaf.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]

    def block(x: Tensor) -> Tensor:
        return layer(x)[0]

    wanted = gradients(block)
    found = gradients(lambda x: checkpoint(block, x, use_reentrant=reentrant))
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_checkpoint_inside_torch_compile() -> None:
    """The recomputed forward draws the seed of the first forward."""
    query, value = torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8, requires_grad=True)

    def block(query: Tensor, value: Tensor) -> Any:
        return attend(query, query, value, dropout_p=0.5, return_weights=True)

    def checkpointed(query: Tensor, value: Tensor) -> Any:
        return checkpoint(block, query, value.sin(), use_reentrant=False)

    fast = torch.compile(checkpointed, fullgraph=True, backend="aot_eager_decomp_partition")
    output, weights = fast(query, value)
    (grad,) = torch.autograd.grad(output.sum(), value)
    torch.testing.assert_close(grad, weights.sum(-2)[..., None] * value.cos())
