"""Packed sequences in torch: higher derivatives, meta and fake tensors, compile, autocast."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import opcheck

import scaledot
from cases import DTYPES
from varlen_cases import FEATURES, Call, Packed, call, cumulative

SMALL = dict(head_dim=4, value_dim=3, dtype="float64")


def small(feature: str, **changes: Any) -> Call:
    common = {**FEATURES[feature], **SMALL, **changes}
    return call(Packed(f"small {feature}", (3, 0, 2, 4), (4, 2, 0, 3), common))


def attend(made: Call, **changes: Any) -> Any:
    def function(query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> tuple[Tensor, Tensor]:
        output, lse = made.run(query=query, key=key, value=value, **changes, **({"attn_mask": mask[0]} if mask else {}))
        return output, lse.masked_fill(lse.isneginf(), 0)  # -inf has no finite differences

    return function


MASKED: dict[str, dict[str, Any]] = {name: dict(mask_columns=3) for name in ("tree", "tree_bias")}


@pytest.mark.parametrize("feature", ["plain", "causal", "gqa", "softcap_scale", "alibi", "dropout", *MASKED])
def test_gradcheck_and_gradgradcheck(feature: str) -> None:
    made = small(feature, **MASKED.get(feature, {}))
    inputs: tuple[Tensor, ...] = (made.query, made.key, made.value)
    if made.attn_mask is not None and made.attn_mask.is_floating_point():
        inputs += (made.attn_mask,)
    torch.autograd.gradcheck(attend(made), inputs, check_forward_ad=True, fast_mode=True)
    torch.autograd.gradgradcheck(attend(made), inputs, check_fwd_over_rev=feature == "causal", fast_mode=True)


def test_gradcheck_of_seqused_k() -> None:
    made = small("causal")
    used = torch.tensor([2, 1, 0, 3])
    inputs = (made.query, made.key, made.value)
    torch.autograd.gradcheck(attend(made, seqused_k=used), inputs, check_forward_ad=True)  # every element
    torch.autograd.gradgradcheck(attend(made, seqused_k=used), inputs, fast_mode=True)


def test_backward_with_create_graph_has_the_same_bits() -> None:
    made = call(Packed("graph", common=FEATURES["everything"]))
    results = made.run()
    plain, graph = (
        torch.autograd.grad(results, (made.query, made.key, made.value), results, retain_graph=True, create_graph=c)
        for c in (False, True)
    )
    assert all(g.requires_grad for g in graph)
    for a, b in zip(plain, graph, strict=True):
        assert torch.equal(a, b)


def test_gradient_when_only_one_input_requires_grad() -> None:
    made = call(Packed("some"))
    results = made.run()
    wanted = torch.autograd.grad(results[0].sum(), (made.query, made.key, made.value))
    for k, name in enumerate(("query", "key", "value")):
        leaf = getattr(made, name).detach().requires_grad_()
        others = {n: getattr(made, n).detach() for n in ("query", "key", "value") if n != name}
        found = torch.autograd.grad(made.run(**{name: leaf}, **others)[0].sum(), leaf)[0]
        assert torch.equal(found, wanted[k])


def test_pages_have_a_forward_mode_derivative() -> None:
    """Pages have no gradient. Forward mode gathers the pages of each sequence."""
    pool, table = torch.randn(3, 4, 2, 4, dtype=torch.float64), torch.tensor([[2, 0], [1, 0]])
    query, tangent = torch.randn(2, 2, 2, 4, dtype=torch.float64).unbind()

    def run(query: Tensor) -> Tensor:
        result: Tensor = scaledot.varlen_attention(
            query, pool, pool, cumulative((1, 1)), None, 1, 8, seqused_k=torch.tensor([7, 2]), block_table=table
        )
        return result

    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(run(forward_ad.make_dual(query, tangent)))
    assert torch.allclose(found.primal, run(query), atol=1e-12)
    step = 1e-6
    wanted = (run(query + step * tangent) - run(query - step * tangent)) / (2 * step)
    assert found.tangent is not None
    assert torch.allclose(found.tangent, wanted, atol=1e-8)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("feature", ["plain", "gqa", "everything", "tree_bias"])
def test_opcheck(feature: str, requires_grad: bool) -> None:
    made = small(feature, dtype="float32")
    p = made.packed
    tensors = [t.detach().requires_grad_(requires_grad) for t in (made.query, made.key, made.value)]
    lengths = cumulative(p.query_lengths), cumulative(p.key_lengths)
    bias = None if made.relative_bias is None else made.relative_bias.detach().requires_grad_(requires_grad)
    mask = None if made.attn_mask is None else made.attn_mask.detach().requires_grad_(requires_grad)
    rest = (*lengths, None, None, made.alibi_slopes, made.dropout_seed, bias, None, None, mask)
    options = dict(max_q=4, max_k=4, **p.options())
    opcheck(torch.ops.scaledot.varlen.default, (*tensors, *rest), options)
    with torch.no_grad():
        output, lse = torch.ops.scaledot.varlen(*tensors, *rest, **options)
    grads = torch.randn_like(output), torch.randn_like(lse)
    # The backward of this op reads the lengths, which cannot be traced. Torch compiles no double backward anyway.
    utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
    opcheck(
        torch.ops.scaledot.varlen_backward.default,
        (*grads, *tensors, *rest, output, lse, None),
        dict(**options, num_splits=None, output_mask=[True] * 3 + [t is not None for t in (bias, mask)]),
        test_utils=utils if requires_grad else [*utils, "test_aot_dispatch_dynamic"],
    )


def test_opcheck_pages() -> None:
    pool, table = torch.randn(3, 4, 2, 4), torch.tensor([[2, 0], [1, 0]])
    used = torch.tensor([7, 2])
    arguments = (torch.randn(2, 2, 4), pool, pool, cumulative((1, 1)), None, used, table, *[None] * 6, 1, 8)
    opcheck(torch.ops.scaledot.varlen.default, arguments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_meta_tensors_have_real_shapes_and_errors(dtype: str) -> None:
    query, key, value = (torch.empty(9, h, d, dtype=DTYPES[dtype], device="meta") for h, d in ((4, 8), (2, 8), (2, 6)))
    cu_seq = torch.empty(4, dtype=torch.int32, device="meta")
    output, lse = scaledot.varlen_attention(query, key, value, cu_seq, cu_seq, 5, 5, enable_gqa=True, return_lse=True)
    assert output.shape == (9, 4, 6)
    assert output.dtype == DTYPES[dtype]
    assert output.is_contiguous()
    assert lse.shape == (4, 9)
    assert lse.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    with pytest.raises(ValueError, match="key: got 2 heads"):
        scaledot.varlen_attention(query, key, value, cu_seq, cu_seq, 5, 5)


COMPILED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": dict(window_size=(-1, 0), return_lse=True),
    "dropout": dict(dropout_p=0.3, softcap=2.0),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_compile_fullgraph(name: str, dynamic: bool) -> None:
    """Forward and backward have the bits of the plain function, for any lengths."""
    torch._dynamo.reset()

    def function(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> Any:
        return scaledot.varlen_attention(query, key, value, cu_q, cu_k, max_q, max_k, **COMPILED[name])

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows, keys in (((3, 5, 9), (4, 7, 8)), ((6, 2), (5, 9)), ((30, 1, 4), (20, 8, 11))):
        made = call(Packed(f"compile {name}", rows, keys))
        found = []
        for run in (function, compiled):
            torch.manual_seed(4)
            results = run(made.query, made.key, made.value, cumulative(rows), cumulative(keys), max(rows), max(keys))
            results = results if isinstance(results, tuple) else (results,)
            loss = sum(r.square().sum() for r in results)
            found.append([*results, *torch.autograd.grad(loss, (made.query, made.key, made.value))])
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)


def test_one_compilation_serves_all_lengths() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiles = []
    compiled = torch.compile(scaledot.varlen_attention, fullgraph=True, backend=counter, dynamic=True)
    for n in (2, 3, 5, 9):
        lengths = tuple(range(3, 3 + n))
        query = torch.randn(sum(lengths), 2, 8)
        compiled(query, query, query, cumulative(lengths), cumulative(lengths), max(lengths), max(lengths))
        compiles.append(counter.frame_count)
    assert len(set(compiles)) == 1


def test_compiled_pages_have_the_same_bits() -> None:
    torch._dynamo.reset()
    pool, table, used = torch.randn(2, 6, 16, 2, 8), torch.tensor([[2, 0], [1, 5]]), torch.tensor([20, 9])
    arguments = (torch.randn(2, 2, 8), pool[0], pool[1], cumulative((1, 1)), None, 1, 32)
    compiled = torch.compile(scaledot.varlen_attention, fullgraph=True, backend="aot_eager")
    wanted = scaledot.varlen_attention(*arguments, seqused_k=used, block_table=table)
    assert torch.equal(compiled(*arguments, seqused_k=used, block_table=table), wanted)


def test_export_keeps_the_op() -> None:
    class Attention(torch.nn.Module):
        def forward(self, query: Tensor, cu_seq: Tensor) -> Tensor:
            result: Tensor = scaledot.varlen_attention(query, query, query, cu_seq, cu_seq, 8, 8, True)
            return result

    arguments = (torch.randn(9, 2, 8), cumulative((4, 5)))
    program = torch.export.export(Attention(), arguments)
    assert sum("scaledot.varlen" in str(node.target) for node in program.graph.nodes) == 1
    assert torch.equal(program.module()(*arguments), Attention()(*arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_inputs(dtype: torch.dtype) -> None:
    made = call(Packed("autocast", common=FEATURES["alibi"]))
    with torch.autocast("cpu", dtype):
        output, lse = made.run()
    assert output.dtype == dtype
    assert lse.dtype == torch.float32
    cast = {n: getattr(made, n).detach().to(dtype) for n in ("query", "key", "value")}
    assert torch.equal(output, made.run(**cast)[0])
    for gradient in torch.autograd.grad(output.float().sum(), (made.query, made.key, made.value)):
        assert gradient.dtype == torch.float32
        assert gradient.any()


def test_functorch_grad_is_autograd_grad() -> None:
    made = call(Packed("functorch"), requires_grad=False)

    def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return made.run(query=query, key=key, value=value)[0].square().sum()

    found = torch.func.grad(loss, argnums=(0, 1, 2))(made.query, made.key, made.value)
    leaves = [t.clone().requires_grad_() for t in (made.query, made.key, made.value)]
    for a, b in zip(found, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        assert torch.equal(a, b)


def test_inference_mode_and_checkpoint_have_the_same_bits() -> None:
    made = call(Packed("modes", common=dict(dropout_p=0.2)))
    wanted = made.run()
    with torch.inference_mode():
        found = made.run()
        assert found[0].is_inference()
        assert torch.equal(found[0], wanted[0])
    again = torch.utils.checkpoint.checkpoint(lambda q: made.run(query=q)[0], made.query, use_reentrant=False)
    gradients = [torch.autograd.grad(r.square().sum(), made.query)[0] for r in (wanted[0], again)]
    assert torch.equal(*gradients)
