"""scaledot.distributed.context_parallel_attention on several processes is one process's attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import context_parallel
import oracle
import scaledot
from cases import Case
from context_parallel import ALL, BOTH, RING, mesh_of
from ranks import Ranks
from scaledot.distributed import context_parallel_attention, shard, unshard

GQA: dict[str, Any] = {"heads": 4, "kv_heads": 2, "enable_gqa": True, "query_length": 37, "key_length": 37}
CASES = [
    Case("plain", **GQA),
    Case("causal", **GQA, causal=True),
    Case("causal_dropout", **{**GQA, "query_length": 67, "key_length": 67}, causal=True, dropout_p=0.3),
    Case("lower_right", **{**GQA, "key_length": 53}, causal=True, causal_alignment="lower_right"),
    Case("window", **{**GQA, "query_length": 83, "key_length": 83}, window=(7, 4)),
    Case("window_left", **{**GQA, "query_length": 83, "key_length": 83}, window=(9, 0), dropout_p=0.2),
    Case("padding", **GQA, mask="bool", mask_shape="B11K", causal=True),
    Case("cross", **{**GQA, "key_length": 90}, mask="bool", mask_shape="B11K", dropout_p=0.4),
    Case("one_key_head", **{**GQA, "kv_heads": 1}, value_dim=28, causal=True),
    Case("scores", **{**GQA, "kv_heads": 4}, softcap=1.5, alibi="H", scale=0.4, causal=True),
    Case("alibi_batch", **GQA, alibi="BH", window=(20, 3)),
    Case("few", **{**GQA, "query_length": 3, "key_length": 3}, causal=True),
    Case("even", **{**GQA, "query_length": 64, "key_length": 64}, causal=True),
]
PLANS: dict[str, tuple[str, Any, str]] = {
    "ring 1 zigzag": ("1", RING, "zigzag"),
    "ring 2 contiguous": ("2", RING, "contiguous"),
    "ring 2 zigzag": ("2", RING, "zigzag"),
    "ring 4 contiguous": ("4", RING, "contiguous"),
    "ring 4 zigzag": ("4", RING, "zigzag"),
    "all_to_all 1 contiguous": ("1", ALL, "contiguous"),
    "all_to_all 1 zigzag": ("1", ALL, "zigzag"),
    "all_to_all 2 zigzag": ("2", ALL, "zigzag"),
    "all_to_all 4 contiguous": ("4", ALL, "contiguous"),
    "all_to_all 4 zigzag": ("4", ALL, "zigzag"),
    "both 2x2 contiguous": ("2x2", BOTH, "contiguous"),
    "both 2x2 zigzag": ("2x2", BOTH, "zigzag"),
    "both 1x4 contiguous": ("1x4", BOTH, "contiguous"),
    "both 1x4 zigzag": ("1x4", BOTH, "zigzag"),
    "both 2x1 zigzag": ("2x1", BOTH, "zigzag"),
    "both 1x1 zigzag": ("1x1", BOTH, "zigzag"),
}
ZIGZAG = ["ring 4 zigzag", "all_to_all 4 zigzag", "both 2x2 zigzag"]


def case_of(name: str) -> Case:
    (case,) = [case for case in CASES if case.name == name]
    return case


def check(four: Ranks, case: Case, plan: str) -> list[context_parallel.Answer]:
    answers = four.run(context_parallel.solve, case, *PLANS[plan])
    solution = oracle.solve(case)
    for name, result in answers[0]["results"].items():
        solution.check(name, result)
        for answer in answers[1:]:
            torch.testing.assert_close(answer["results"][name], result, rtol=0, atol=0, equal_nan=True)
    return answers


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_and_gradients(four: Ranks, case: Case, plan: str) -> None:
    answers = check(four, case, plan)
    assert all(answer["layout"] for answer in answers) or PLANS[plan][1] != RING


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("plan", ZIGZAG)
@pytest.mark.parametrize("name", ["causal_dropout", "window", "padding", "one_key_head"])
def test_dtypes(four: Ranks, name: str, plan: str, dtype: str) -> None:
    check(four, case_of(name).with_(dtype=dtype), plan)


def test_the_same_bits_every_time(four: Ranks) -> None:
    for case in case_of("causal_dropout"), case_of("padding"):
        for plan in ZIGZAG:
            first, second = (four.run(context_parallel.solve, case, *PLANS[plan])[0]["results"] for _ in range(2))
            assert all(torch.equal(first[name], second[name]) for name in first)


def run_with_means(method: Any) -> tuple[float, float]:
    """The error of this rank's gradient of query in bfloat16, with and without what rounding took off the output.

    Keys and values have large means, to which the gradient owes nothing.
    """
    mesh, generator = mesh_of("2"), torch.Generator().manual_seed(1)
    whole = [4 * (k > 0) + torch.randn(1, 4, 320, 16, generator=generator) / 4 for k in range(3)]
    whole = [t.bfloat16() for t in whole]
    grad = torch.randn(1, 4, 320, 16, generator=generator).bfloat16()
    query = whole[0].double().requires_grad_()
    torch.nn.functional.scaled_dot_product_attention(query, *(t.double() for t in whole[1:])).backward(grad.double())
    assert query.grad is not None
    exact = shard(query.grad, mesh, 2)
    errors = []
    for keep in (True, False):
        with scaledot.save_for_backward(keep):
            local = [shard(t, mesh, 2).requires_grad_() for t in whole]
            context_parallel_attention(*local, mesh, method=method).backward(shard(grad, mesh, 2))
        assert local[0].grad is not None
        errors.append(float((local[0].grad.double() - exact).norm() / exact.norm()))
    return errors[0], errors[1]


@pytest.mark.parametrize("method", [RING, ALL])
def test_the_gradient_of_the_query_is_exact(four: Ranks, method: Any) -> None:
    for kept, rounded in four.run(run_with_means, method)[:2]:
        assert kept < rounded / 3


# ---------------------------------------------------------------------------------------------------- torch around it
def inputs_of(length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    heads = (4, 2, 2)
    return tuple(torch.randn(2, h, length, 8, generator=generator).to(dtype) for h in heads)


def drop_as_one_process(method: Any, ranks: str) -> tuple[Tensor, Tensor]:
    """With dropout, from one seed: whole, and sharded with ranks whose generators are each in another state."""
    mesh, whole = mesh_of(ranks), inputs_of(45)
    torch.manual_seed(3)
    wanted = scaledot.scaled_dot_product_attention(*whole, dropout_p=0.4, is_causal=True, enable_gqa=True)
    first = not any(mesh.get_coordinate() or ())
    torch.manual_seed(3 if first else 99 + dist.get_rank())
    local = [shard(t, mesh, 2) for t in whole]
    found = context_parallel_attention(*local, mesh, dropout_p=0.4, is_causal=True, enable_gqa=True, method=method)
    return wanted, unshard(found, mesh, 2)


@pytest.mark.parametrize(("ranks", "method"), [("4", RING), ("2", ALL), ("2x2", BOTH)])
def test_the_seed_of_one_process_drops_what_one_process_drops(four: Ranks, ranks: str, method: Any) -> None:
    for wanted, found in four.run(drop_as_one_process, method, ranks):
        torch.testing.assert_close(found, wanted)


class _Whole(torch.autograd.Function):
    """The same tensor on both ranks, of which each uses a part: gradients add up."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad, group=mesh_of("2").get_group())
        return grad


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return unshard(tensor, mesh_of("2"), 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return shard(grad, mesh_of("2"), 2)


def run_gradcheck(method: Any, options: dict[str, Any]) -> bool:
    inputs = [t[:1, :, :, :2].double().requires_grad_() for t in inputs_of(5)]

    def attention(*whole: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(5)
        local = [shard(_Whole.apply(t), mesh_of("2"), 2) for t in whole]
        output, lse = context_parallel_attention(
            *local, mesh_of("2"), method=method, enable_gqa=True, return_lse=True, **options
        )
        return _Gathered.apply(output), _Gathered.apply(lse)

    return torch.autograd.gradcheck(attention, inputs)


@pytest.mark.parametrize("method", [RING, ALL])
def test_gradcheck(four: Ranks, method: Any) -> None:
    assert all(four.run(run_gradcheck, method, {"is_causal": True, "dropout_p": 0.3}))
    assert all(four.run(run_gradcheck, method, {"window": (1, 1), "softcap": 2.0}))


def run_checkpoint(method: Any) -> bool:
    mesh = mesh_of("4")
    local = [shard(t, mesh, 2).requires_grad_() for t in inputs_of(37)]

    def attention(*tensors: Tensor) -> Tensor:
        result: Tensor = context_parallel_attention(*tensors, mesh, dropout_p=0.3, enable_gqa=True, method=method)
        return result

    grads = []
    for wrapped in False, True:
        torch.manual_seed(2)
        output = checkpoint(attention, *local, use_reentrant=False) if wrapped else attention(*local)
        grads.append(torch.autograd.grad(output.square().sum(), local))
    return all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("method", [RING, ALL])
def test_activation_checkpointing(four: Ranks, method: Any) -> None:
    assert all(four.run(run_checkpoint, method))


def run_compiled(method: Any) -> tuple[bool, int]:
    """Whether a compiled block of two attentions gives what it gives uncompiled, and its graph breaks."""
    mesh = mesh_of("4")
    local = [shard(t, mesh, 2).requires_grad_() for t in inputs_of(37)]

    def block(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended = context_parallel_attention(query * 0.5, key, value, mesh, enable_gqa=True, method=method)
        query = torch.nn.functional.gelu(attended) + query
        attended = context_parallel_attention(query, key * 2, value, mesh, enable_gqa=True, method=method)
        return (query + attended).square()

    compiled = torch.compile(block, backend="aot_eager")
    results = []
    for function in block, compiled:
        output = function(*local)
        results.append([output, *torch.autograd.grad(output.sum(), local)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    torch._dynamo.reset()
    breaks = torch._dynamo.explain(block)(*local).graph_break_count
    torch._dynamo.reset()
    return True, breaks


@pytest.mark.parametrize("method", [RING, ALL])
def test_compile_breaks_only_where_ranks_talk(four: Ranks, method: Any) -> None:
    assert four.run(run_compiled, method) == [(True, 2)] * 4


def run_autocast(method: Any) -> tuple[torch.dtype, bool]:
    mesh, whole = mesh_of("2"), inputs_of(37)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = scaledot.scaled_dot_product_attention(*whole, enable_gqa=True)
        local = [shard(t, mesh, 2).requires_grad_() for t in whole]
        found = context_parallel_attention(*local, mesh, enable_gqa=True, method=method)
    found.sum().backward()
    close = torch.allclose(unshard(found.detach(), mesh, 2).float(), wanted.float(), atol=2e-2)
    return found.dtype, close and all(t.grad is not None and t.grad.dtype == torch.float32 for t in local)


@pytest.mark.parametrize("method", [RING, ALL])
def test_autocast(four: Ranks, method: Any) -> None:
    assert four.run(run_autocast, method) == [(torch.bfloat16, True)] * 4
