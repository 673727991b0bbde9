"""`out`: the output is written to memory of the caller."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError
from torch.library import opcheck
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import quantised_cache
import scaledot
from case_list import BY_NAME
from cases import Case
from kernels_under_test import KERNELS, forced
from varlen_cases import cumulative

attend: Any = scaledot.scaled_dot_product_attention
packed: Any = scaledot.varlen_attention

NAMES = [
    "plain-float32", "causal-bfloat16", "everything-float16", "weights-float64", "gqa-float32", "value_dim-bfloat16",
    "2d-float32", "3d-float32", "5d-float32", "crossed_batches-float32", "blhd-float32", "bias-float32",
    "dropout-float32", "decode-float32", "decode-bfloat16",
]  # fmt: skip
_GUARD = 7.0


def guarded(like: Tensor, pad: int = 3, order: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
    """A slice with `like`'s shape of a larger tensor, and the larger one. `order`: of its dimensions in memory."""
    order = order or tuple(range(like.dim()))
    sizes = [like.size(d) + (pad if d == like.dim() - 1 else 2) for d in order]
    whole = torch.full(sizes, _GUARD, dtype=like.dtype)
    inner = whole.permute([order.index(d) for d in range(like.dim())])
    for d in range(like.dim()):
        inner = inner.narrow(d, 1, like.size(d))
    return inner, whole


def assert_writes_only(out: Tensor, whole: Tensor, wanted: Tensor) -> None:
    assert torch.equal(out, wanted)
    out.fill_(_GUARD)
    assert whole.eq(_GUARD).all(), "a kernel wrote next to out"


def call_of(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function and its arguments for a case of the library; the same dropout every time."""
    case = BY_NAME[name]
    inputs = case.make()
    tensors = {n: getattr(inputs, n) for n in ("query", "key", "value", "attn_mask", "alibi_slopes", "relative_bias")}

    def run(**changes: Any) -> Any:
        torch.manual_seed(3)
        return attend(**{**case.functional_arguments(), **tensors, "return_lse": True, **changes})

    return run, tensors


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_in_every_layout(name: str) -> None:
    run, _ = call_of(name)
    for weights in (False, True):
        wanted = run(return_weights=weights)
        orders: list[tuple[int, ...] | None] = [None]
        if wanted[0].dim() >= 3:
            last = wanted[0].dim() - 1
            orders += [(*range(last - 2), last - 1, last - 2, last), (*reversed(range(last)), last)]
        for order in orders:
            for pad in (2, 0):
                out, whole = guarded(wanted[0], pad, order) if pad else (torch.full_like(wanted[0], _GUARD), None)
                found = run(return_weights=weights, out=out)
                assert found[0] is out
                assert all(map(torch.equal, found[1:], wanted[1:]))
                if whole is None:
                    assert torch.equal(out, wanted[0])
                else:
                    assert_writes_only(out, whole, wanted[0])


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel(kernel: str) -> None:
    query, key, value = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 900, 64), torch.randn(1, 2, 900, 48)
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [t.to(dtype) for t in (query, key, value)]
        with forced(kernel):
            if scaledot.explain(*tensors, enable_gqa=True).forward.kernel != kernel:
                continue
            wanted = attend(*tensors, enable_gqa=True)
            out, whole = guarded(wanted)
            attend(*tensors, enable_gqa=True, out=out)
        assert_writes_only(out, whole, wanted)


def sequences(paged: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    rows, keys = (7, 1, 0, 33), (40, 90, 3, 33)
    query = torch.randn(sum(rows), 4, 32)
    longest = dict(max_q=max(rows), max_k=max(keys), enable_gqa=True, is_causal=True, return_lse=True)
    if not paged:
        key, value = torch.randn(2, sum(keys), 2, 32).unbind()
        return dict(query=query, key=key, value=value, cu_seq_q=cumulative(rows), cu_seq_k=cumulative(keys), **longest)
    key, value = torch.randn(2, 30, 16, 2, 32).unbind()
    table = torch.randperm(30)[: 4 * 6].reshape(4, 6)
    return dict(
        query=query, key=key, value=value, cu_seq_q=cumulative(rows), cu_seq_k=None, seqused_k=torch.tensor(keys),
        block_table=table, **longest,
    )  # fmt: skip


@pytest.mark.parametrize("paged", [False, True])
def test_varlen(paged: bool) -> None:
    call = sequences(paged)
    wanted = packed(**call)
    for order in (None, (1, 0, 2)):
        out, whole = guarded(wanted[0], order=order)
        found = packed(**call, out=out)
        assert found[0] is out
        assert torch.equal(found[1], wanted[1])
        assert_writes_only(out, whole, wanted[0])


@pytest.mark.parametrize("cache", quantised_cache.CACHES)
def test_quantised_keys_and_values(cache: str) -> None:
    made = quantised_cache.make("decode", cache, scales="heads")
    wanted = made.run()
    out, whole = guarded(wanted[0])
    found = made.run(out=out)
    assert torch.equal(found[1], wanted[1])
    assert_writes_only(out, whole, wanted[0])


def test_no_scores() -> None:
    query, nothing = torch.randn(2, 3, 8), torch.randn(2, 0, 8)
    out = torch.full((2, 3, 8), _GUARD)
    assert attend(query, nothing, nothing, out=out) is out
    assert not out.any()
    bounds = cumulative((3, 0)), cumulative((0, 0))
    out = torch.full((3, 2, 8), _GUARD)
    packed(query.transpose(0, 1), nothing.transpose(0, 1), nothing.transpose(0, 1), *bounds, 3, 0, out=out)
    assert not out.any()
    empty = torch.empty(0, 3, 8)
    assert attend(empty, empty, empty, out=torch.empty(0, 3, 8)).shape == (0, 3, 8)


def test_allocates_no_output() -> None:
    query, key, value = torch.randn(3, 1, 4, 256, 64).unbind()
    out = torch.empty_like(query)

    def allocated(**arguments: Any) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            attend(query, key, value, is_causal=True, **arguments)
        return sum(max(event.self_cpu_memory_usage, 0) for event in found.events() if event.name.startswith("scaledot"))

    size = out.numel() * out.element_size()
    assert size <= allocated() < 2 * size
    assert 0 < allocated(out=out) < size  # lse


# ---------------------------------------------------------------------------------------------------- refused
X = torch.randn(2, 3, 5, 8)
SHAPE = (2, 3, 5, 8)


def strided(*strides: int) -> Tensor:
    return torch.zeros(9999).as_strided(SHAPE, strides)


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a list": (lambda: [1.0], TypeError, "out: got a list; needs a torch.Tensor"),
    "shape": (lambda: torch.empty(2, 3, 5, 7), ValueError, r"out: got shape \(2, 3, 5, 7\); needs \(2, 3, 5, 8\)"),
    "dims": (lambda: torch.empty(6, 5, 8), ValueError, r"out: got shape \(6, 5, 8\); needs \(2, 3, 5, 8\)"),
    "dtype": (lambda: torch.empty(SHAPE).double(), TypeError, "out: got dtype torch.float64; needs torch.float32"),
    "integers": (lambda: torch.empty(SHAPE).long(), TypeError, "out: got dtype torch.int64; needs torch.float32"),
    "device": (lambda: torch.empty(SHAPE, device="meta"), ValueError, "out: got a tensor on meta; needs .* cpu"),
    "sparse": (lambda: torch.zeros(SHAPE).to_sparse(), TypeError, "out: got a tensor of layout Sparse"),
    "repeated rows": (lambda: torch.empty(2, 3, 1, 8).expand(SHAPE), ValueError, "needs a place in memory for each"),
    "repeated column": (lambda: torch.empty(2, 3, 5, 1).expand(SHAPE), ValueError, "needs a place in memory for each"),
    "overlapping rows": (lambda: strided(120, 40, 7, 1), ValueError, r"got strides \(120, 40, 7, 1\) .* a place"),
    "overlapping heads": (lambda: strided(200, 9, 8, 1), ValueError, "needs a place in memory for each element"),
    "columns apart": (lambda: strided(240, 80, 16, 2), ValueError, "out: got strides .*; needs a last stride of 1"),
    "transposed": (lambda: torch.empty(2, 3, 8, 5).mT, ValueError, "out: got strides .*; needs a last stride of 1"),
    "a gradient": (lambda: torch.empty(SHAPE, requires_grad=True), ValueError, "out: got a tensor that requires grad"),
    "query": (lambda: X, ValueError, "out: got a tensor that shares memory with query; needs memory of its own"),
    "a part of query": (lambda: X.view(-1).as_strided(SHAPE, (120, 40, 8, 1)), ValueError, "memory with query"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_out(case: str) -> None:
    make, kind, message = BAD[case]
    for function in (attend, scaledot.explain):
        with pytest.raises(kind, match=message):
            function(X, X + 1, X + 2, out=make())
    assert X.isfinite().all()


VARLEN_BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "shape": (lambda call: torch.empty(41, 4, 31), ValueError, r"out: got shape .* needs \(41, 4, 32\)"),
    "dtype": (
        lambda call: torch.empty(41, 4, 32).half(),
        TypeError,
        "out: got dtype torch.float16; needs torch.float32",
    ),
    "columns apart": (lambda call: torch.empty(41, 32, 4).mT, ValueError, "needs a last stride of 1"),
    "a gradient": (lambda call: torch.empty(41, 4, 32, requires_grad=True), ValueError, "that requires grad"),
    "query": (lambda call: call["query"], ValueError, "shares memory with query"),
    "a number": (lambda call: 3.0, TypeError, "out: got 3.0, a float; needs a torch.Tensor"),
}


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("case", VARLEN_BAD)
def test_bad_out_of_varlen(case: str, paged: bool) -> None:
    make, kind, message = VARLEN_BAD[case]
    call = sequences(paged)
    for function in (packed, scaledot.explain_varlen):
        with pytest.raises(kind, match=message):
            function(**call, out=make(call))


def test_out_in_the_memory_of_other_arguments() -> None:
    memory = torch.randn(2 * 3 * 5 * 8 * 3)
    out = memory[:240].view(SHAPE)
    for name, tensor in {
        "key": memory[239:479].view(SHAPE),
        "value": memory[3:243].view(SHAPE),
        "attn_mask": memory[100:105].view(5, 1),
        "alibi_slopes": memory[0:3],
        "relative_bias": memory[11:12],
    }.items():
        given = {**dict(query=X, key=X, value=X), name: tensor}
        with pytest.raises(ValueError, match=f"out: got a tensor that shares memory with {name};"):
            attend(**given, out=out)
    call = sequences(True)
    with pytest.raises(ValueError, match="shares memory with value"):
        packed(**call, out=call["value"].view(-1)[100 : 100 + 41 * 4 * 32].view(41, 4, 32))


def test_out_between_other_arguments_of_one_memory() -> None:
    fused = torch.randn(2, 70, 4, 4, 32)  # (batch, row, query | key | value | output, head, column)
    query, key, value, out = (t.transpose(1, 2) for t in fused.unbind(2))
    wanted = attend(query, key, value)
    before = fused[:, :, :3].clone()
    attend(query, key, value, out=out)
    assert torch.equal(out, wanted)
    assert torch.equal(fused[:, :, :3], before)
    half = torch.randn(2, 4, 70, 64)  # the columns of a head are halves
    left, right = half.split(32, -1)
    wanted = attend(left, left, left)
    attend(left, left, left, out=right)
    assert torch.equal(right, wanted)
    with pytest.raises(ValueError, match="shares memory with query"):
        attend(left, left, left, out=half[..., 31:63])


# ---------------------------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", "relative_bias", "alibi_slopes"])
def test_refused_where_a_gradient_is_recorded(name: str) -> None:
    shapes = {"attn_mask": (5, 5), "relative_bias": (3, 9), "alibi_slopes": (3,)}
    given = {**dict(query=X, key=X, value=X), name: torch.randn(shapes.get(name, SHAPE), requires_grad=True)}
    for function in (attend, scaledot.explain):
        with pytest.raises(ValueError, match=f"{name}.* requires grad"):
            function(**given, out=torch.empty(SHAPE))
    with torch.no_grad():
        wanted = attend(**given)
        out = attend(**given, out=torch.empty(SHAPE))
    assert torch.equal(out, wanted)
    assert not out.requires_grad


def test_refused_in_transforms() -> None:
    def into(x: Tensor) -> Tensor:
        result: Tensor = attend(x, x, x, out=torch.empty(x.shape))
        return result

    with pytest.raises(ValueError, match="out: got a tensor while query has a tangent"):
        torch.func.jvp(into, (X,), (X,))
    with pytest.raises(ValueError, match="out: got a tensor while query requires grad"):
        torch.func.grad(lambda x: into(x).sum())(X)
    with pytest.raises(NotImplementedError, match=r"out: got a tensor under torch.vmap; needs None"):
        torch.vmap(into)(X)
    with pytest.raises(NotImplementedError, match=r"out: got a tensor under torch.vmap; needs None"):
        torch.vmap(lambda x, out: attend(X, X, x, out=out))(torch.stack([X, X]), torch.empty(2, *SHAPE))
    call = sequences(False)
    with pytest.raises(NotImplementedError, match=r"out: got a tensor under torch.vmap; needs None"):
        torch.vmap(lambda query: packed(**call | dict(query=query, out=torch.empty(41, 4, 32)))[0])(
            torch.randn(2, 41, 4, 32)
        )


def test_jagged() -> None:
    rows = torch.nested.nested_tensor([torch.randn(3, 4, 8), torch.randn(5, 4, 8)], layout=torch.jagged)
    query = rows.transpose(1, 2)
    with pytest.raises(ValueError, match="out: got a Tensor with nested tensors; needs None"):
        attend(query, query, query, out=torch.empty(8, 4, 8))


def test_modes() -> None:
    wanted, out = attend(X, X, X), torch.empty(SHAPE)
    with torch.inference_mode():
        inference = torch.empty(SHAPE)
        assert torch.equal(attend(X, X, X, out=inference), wanted)
        assert torch.equal(attend(X, X, X, out=out), wanted)
    with pytest.raises(RuntimeError, match="inference tensor"):
        attend(X, X, X, out=inference)
    with torch.autocast("cpu", torch.bfloat16):
        half = torch.empty(SHAPE, dtype=torch.bfloat16)
        assert torch.equal(attend(X, X, X, out=half), attend(X, X, X))
        with pytest.raises(TypeError, match=r"out: got dtype torch.float32; needs torch.bfloat16"):
            attend(X, X, X, out=out)
    lazy = torch.zeros(SHAPE)
    copy = torch._lazy_clone(lazy)
    attend(X, X, X, out=copy)
    assert torch.equal(copy, wanted)
    assert not lazy.any(), "a copy-on-write tensor was written through"


def test_a_node_notices_that_its_tensor_was_overwritten() -> None:
    weight, out = torch.randn(8, requires_grad=True), torch.randn(SHAPE)
    product = (weight * out).sum()
    attend(X, X, X, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_torch_function() -> None:
    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func, kwargs

    mine = torch.empty(SHAPE).as_subclass(Mine)
    function, arguments = attend(X, X, X, out=mine)
    assert function is attend
    assert arguments["out"] is mine


# ---------------------------------------------------------------------------------------------------- tracing
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile(backend: str) -> None:
    torch._dynamo.reset()

    def into(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        output, lse = attend(x * 2, x, x, is_causal=True, out=out, return_lse=True)
        return output + 1, lse

    compiled = torch.compile(into, backend=backend, fullgraph=True, dynamic=True)
    for length in (5, 40, 17):
        x = torch.randn(2, 3, length, 8)
        outs = [guarded(x, order=(0, 2, 1, 3)) for _ in range(2)]
        wanted, found = into(x, outs[0][0]), compiled(x, outs[1][0])
        assert all(map(torch.equal, wanted, found))
        assert torch.equal(outs[0][0], outs[1][0])
        assert_writes_only(outs[1][0], outs[1][1], outs[0][0].clone())
    with pytest.raises(TorchRuntimeError, match=r"out: got shape"):
        torch.compile(into, backend="eager")(X, torch.empty(2, 3, 5, 9))

    @torch.compile(backend=backend, fullgraph=True)
    def same(x: Tensor, out: Tensor) -> Any:
        return attend(x, x, x, out=out)

    out = torch.empty(SHAPE)
    assert same(X, out) is out
    assert torch.equal(out, attend(X, X, X))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("paged", [False, True])
def test_compile_varlen(backend: str, paged: bool) -> None:
    torch._dynamo.reset()
    call = sequences(paged)
    wanted = packed(**call)

    @torch.compile(backend=backend, fullgraph=True)
    def into(query: Tensor, out: Tensor) -> Any:
        return packed(**call | dict(query=query * 1, out=out))

    out, whole = guarded(wanted[0])
    found = into(call["query"], out)
    assert torch.equal(found[1], wanted[1])
    assert_writes_only(out, whole, wanted[0])


def test_compiled_memory_that_the_graph_makes_itself() -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True)
    def both(x: Tensor) -> Tensor:
        buffer = x.new_empty(2, 2, 5, 3, 8)
        for part, y in zip(buffer, (x, x + 1), strict=True):
            attend(y, y, y, out=part.transpose(1, 2))
        return buffer * 2

    x = torch.randn(SHAPE)
    wanted = torch.stack([attend(y, y, y) for y in (x, x + 1)]).transpose(2, 3) * 2
    assert torch.equal(both(x), wanted)


def test_export() -> None:
    class Into(torch.nn.Module):
        def forward(self, x: Tensor, out: Tensor) -> Tensor:
            result: Tensor = attend(x, x, x, out=out)
            return result

    program = torch.export.export(Into(), (X, torch.empty(SHAPE)))
    out = torch.empty(SHAPE)
    assert torch.equal(program.module()(X, out), attend(X, X, X))
    assert torch.equal(out, attend(X, X, X))


@pytest.mark.parametrize("strides", [None, (120, 8, 24, 1), (360, 120, 16, 1)])
def test_opcheck(strides: tuple[int, ...] | None) -> None:
    out = torch.empty(SHAPE) if strides is None else torch.empty_strided(SHAPE, strides)
    arguments = (out, X.clone(), X.clone(), X.clone(), torch.randn(5, 5))
    opcheck(torch.ops.scaledot.sdpa_out.default, arguments, dict(return_weights=True, softcap=2.0))


@pytest.mark.parametrize("paged", [False, True])
def test_opcheck_varlen(paged: bool) -> None:
    call = sequences(paged)
    del call["return_lse"]
    optional = ("seqused_k", "block_table", "alibi_slopes", "dropout_seed", "relative_bias")
    arguments = {**dict.fromkeys((*optional, "k_scale", "v_scale", "attn_mask")), **call, "out": torch.empty(41, 4, 32)}
    opcheck(torch.ops.scaledot.varlen_out.default, (), arguments)


def test_meta_and_flops() -> None:
    meta = torch.empty(SHAPE, device="meta")
    assert attend(meta, meta, meta, out=torch.empty_like(meta)).is_meta
    with pytest.raises(ValueError, match="out: got a tensor on cpu"):
        attend(meta, meta, meta, out=torch.empty(SHAPE))
    counts = []
    for arguments in ({}, {"out": torch.empty(SHAPE)}):
        with FlopCounterMode(display=False) as counter:
            attend(X, X, X, **arguments)
        counts.append(counter.get_total_flops())
    call = sequences(False)
    for arguments in ({}, {"out": torch.empty(41, 4, 32)}):
        with FlopCounterMode(display=False) as counter:
            packed(**call, **arguments)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    assert counts[2] == counts[3] > 0


def test_explain() -> None:
    plain = scaledot.explain(X, X, X)
    assert scaledot.explain(X, X, X, out=torch.empty(SHAPE)).forward == plain.forward
    meta = torch.empty(SHAPE, device="meta")
    assert scaledot.explain(meta, meta, meta, out=meta.clone()).forward.kernel == plain.forward.kernel
    call = sequences(True)
    assert (
        scaledot.explain_varlen(**call, out=torch.empty(41, 4, 32)).forward == scaledot.explain_varlen(**call).forward
    )


def test_a_case_with_several_batch_dimensions() -> None:
    case = Case("out", batch=(2, 3, 2), query_length=5, key_length=9, head_dim=8)
    inputs = case.make()
    wanted = attend(inputs.query, inputs.key, inputs.value)
    out, whole = guarded(wanted, order=(2, 4, 0, 3, 1, 5))
    attend(inputs.query, inputs.key, inputs.value, out=out)
    assert_writes_only(out, whole, wanted)
