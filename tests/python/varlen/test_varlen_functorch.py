"""torch.func over packed sequences: vmap makes one call of the op, and each sample gets its own result bit for bit."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp

import scaledot
from varlen_cases import cumulative
from varlen_samples import CU_K, CU_Q, SAMPLES, assert_bits, attend, calls, looped, normal, qkv, samples_of

pytestmark = [
    pytest.mark.filterwarnings("error:There is a performance drop"),  # torch warns if it runs an op once a sample
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal softcap": dict(is_causal=True, softcap=2.0),
    "window upper left": dict(window=(1, 2), causal_alignment="upper_left", scale=0.4),
    "gqa": dict(enable_gqa=True),
}


@pytest.mark.parametrize("batched", ["qkv", "q", "k", "v", "qv", "kv"])
@pytest.mark.parametrize("name", OPTIONS)
def test_forward_and_gradients_of_each_sample(name: str, batched: str) -> None:
    """Gradients of what is not batched are a sample's each, too."""
    one = qkv(4, 2) if name == "gqa" else qkv()
    tensors = [many if n in batched else single for n, single, many in zip("qkv", one, samples_of(*one), strict=True)]
    in_dims = tuple(0 if n in batched else None for n in "qkv")

    def loss(*qkv: Tensor) -> Any:
        output, lse = attend(*qkv, CU_Q, CU_K, 4, 6, return_lse=True, **OPTIONS[name])
        return output.square().sum() + lse.sin().sum(), (output, lse)

    def each(*qkv: Tensor) -> Any:
        gradients, results = grad(loss, argnums=(0, 1, 2), has_aux=True)(*qkv)
        return (*gradients, *results)

    with calls(varlen=1, varlen_backward=1):
        found = torch.vmap(each, in_dims=in_dims)(*tensors)
    assert_bits(found, looped(each, in_dims, *tensors))


def test_in_dims_out_dims_chunks_and_nesting() -> None:
    tensors = samples_of(*qkv())

    def run(*qkv: Tensor) -> Any:
        return attend(*qkv, CU_Q, CU_K, 4, 6)

    wanted = looped(run, (0, 0, 0), *tensors)
    moved = [t.movedim(0, d) for t, d in zip(tensors, (1, 2, 3), strict=True)]
    with calls(varlen=1):
        assert_bits(torch.vmap(run, in_dims=(1, 2, -1), out_dims=3)(*moved), wanted.movedim(0, 3))
    assert_bits(torch.vmap(run, chunk_size=2)(*tensors), wanted)
    twice = [torch.stack([t, t + 1]) for t in tensors]
    with calls(varlen=1):
        found = torch.vmap(torch.vmap(run))(*twice)
    assert_bits(found, torch.stack([looped(run, (0, 0, 0), *(t[i] for t in twice)) for i in range(2)]))
    pairs = torch.vmap(torch.vmap(run, in_dims=(None, 0, 0)), in_dims=(0, None, None))
    with calls(varlen=1):
        found = pairs(*tensors)
    wanted = [looped(lambda k, v, q=q: run(q, k, v), (0, 0), *tensors[1:]) for q in tensors[0]]
    assert_bits(found, torch.stack(wanted))


def test_lengths_may_differ_from_sample_to_sample() -> None:
    tensors = samples_of(*qkv())
    cu_q = torch.stack([cumulative(n) for n in ((3, 0, 4), (7, 0, 0), (2, 3, 2))])
    cu_k = torch.stack([cumulative(n) for n in ((2, 5, 6), (5, 5, 3), (0, 0, 13))])
    used = torch.tensor([[2, 1, 6], [5, 0, 3], [0, 0, 9]])

    def run(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, used: Tensor) -> Any:
        return attend(query, key, value, cu_q, cu_k, 7, 13, True, seqused_k=used, return_lse=True)

    for in_dims in ((0, 0, 0, 0, 0, 0), (0, None, None, 0, 0, 0), (None, None, None, 0, None, None)):
        arguments = [t if d == 0 else t[0] for t, d in zip((*tensors, cu_q, cu_k, used), in_dims, strict=True)]
        with calls(varlen=1):
            found = torch.vmap(run, in_dims=in_dims)(*arguments)
        assert_bits(found, looped(run, in_dims, *arguments))

    def gradients(*arguments: Tensor) -> Any:
        return grad(lambda *qkv: run(*qkv, *arguments[3:])[0].square().sum(), argnums=(0, 1, 2))(*arguments[:3])

    with calls(varlen=1, varlen_backward=1):
        found = torch.vmap(gradients)(*tensors, cu_q, cu_k, used)
    assert_bits(found, looped(gradients, (0,) * 6, *tensors, cu_q, cu_k, used))


@pytest.mark.parametrize("shape", [(2,), (3, 2)])
def test_alibi(shape: tuple[int, ...]) -> None:
    query, key, value = qkv()
    queries, slopes = samples_of(query)[0], torch.rand(SAMPLES, *shape)

    def run(query: Tensor, slopes: Tensor) -> Any:
        return attend(query, key, value, CU_Q, CU_K, 4, 6, alibi_slopes=slopes)

    for in_dims in ((0, 0), (None, 0), (0, None)):
        arguments = [t if d == 0 else t[0] for t, d in zip((queries, slopes), in_dims, strict=True)]
        with calls(varlen=1):
            found = torch.vmap(run, in_dims=in_dims)(*arguments)
        assert_bits(found, looped(run, in_dims, *arguments))


@pytest.mark.parametrize("batched", ["query", "pool", "table", "used", "all"])
def test_pages(batched: str) -> None:
    """A pool that is not batched is read in place."""
    query, pool = normal(SAMPLES, 2, 2, 4), normal(SAMPLES, 2, 4, 3, 2, 4)
    table = torch.tensor([[[2, 0], [1, 3]], [[0, 1], [3, 2]], [[1, 3], [0, 2]]])
    used = torch.tensor([[5, 3], [6, 4], [4, 2]])

    def run(query: Tensor, pool: Tensor, table: Tensor, used: Tensor) -> Any:
        return attend(query, *pool.unbind(0), cumulative((1, 1)), None, 1, 6, seqused_k=used, block_table=table)

    in_dims = tuple(0 if batched in (name, "all") else None for name in ("query", "pool", "table", "used"))
    arguments = [t if d == 0 else t[0] for t, d in zip((query, pool, table, used), in_dims, strict=True)]
    with calls(varlen=1):
        found = torch.vmap(run, in_dims=in_dims)(*arguments)
    assert_bits(found, looped(run, in_dims, *arguments))


def test_only_the_values_pool_is_batched() -> None:
    query, key, values = normal(1, 2, 4), normal(2, 3, 2, 4), normal(SAMPLES, 2, 3, 2, 5)

    def run(value: Tensor) -> Any:
        table, used = torch.tensor([[1, 0]]), torch.tensor([5])
        return attend(query, key, value, cumulative((1,)), None, 1, 6, seqused_k=used, block_table=table)

    with calls(varlen=1):
        found = torch.vmap(run)(values)
    assert_bits(found, looped(run, (0,), values))


@pytest.mark.parametrize("transform", ["jacrev", "jacfwd", "hessian", "vjp", "jvp", "rev of fwd", "fwd of rev"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "softcap": 2.0}], ids=["plain", "causal softcap"])
def test_transforms_alone_and_under_vmap(transform: str, options: dict[str, Any]) -> None:
    """Compared with the same transform of one scaled_dot_product_attention for each sequence."""
    cu_q, cu_k = cumulative((2, 1)), cumulative((3, 2))
    queries, key, value = normal(SAMPLES, 3, 1, 2), normal(5, 1, 2), normal(5, 1, 2)

    def by_sequence(query: Tensor) -> Tensor:
        parts = [(query[:2], key[:3], value[:3]), (query[2:], key[3:], value[3:])]
        sdpa: Any = scaledot.scaled_dot_product_attention
        done = [sdpa(*(t.transpose(0, 1) for t in p), causal_alignment="lower_right", **options) for p in parts]
        return torch.cat([d.transpose(0, 1) for d in done])

    def packed(query: Tensor) -> Tensor:
        result: Tensor = attend(query, key, value, cu_q, cu_k, 2, 3, **options)
        return result

    def transformed(function: Any) -> Any:
        def loss(query: Tensor) -> Tensor:
            return function(query).square().sum()

        apply: dict[str, Any] = {
            "jacrev": jacrev(function),
            "jacfwd": jacfwd(function),
            "hessian": hessian(loss),
            "vjp": lambda q: vjp(loss, q)[1](torch.ones((), dtype=q.dtype))[0],
            "jvp": lambda q: jvp(loss, (q,), (q.cos(),))[1],
            "rev of fwd": jacrev(jacfwd(loss)),
            "fwd of rev": jacfwd(jacrev(loss)),
        }
        return apply[transform]

    wanted = looped(transformed(by_sequence), (0,), queries)
    torch.testing.assert_close(transformed(packed)(queries[0]), wanted[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.vmap(transformed(packed))(queries), wanted, rtol=1e-12, atol=1e-12)


def test_jvp_of_a_vmap() -> None:
    queries, key, value = samples_of(qkv()[0])[0], *qkv()[1:]

    def run(queries: Tensor, key: Tensor, value: Tensor) -> Any:
        return torch.vmap(lambda q: attend(q, key, value, CU_Q, CU_K, 4, 6, True))(queries)

    tangents = tuple(torch.randn_like(t) for t in (queries, key, value))
    primal, tangent = jvp(run, (queries, key, value), tangents)
    torch.testing.assert_close(primal, run(queries, key, value), rtol=1e-12, atol=1e-12)
    step = 1e-6
    moved = [(t + step * d, t - step * d) for t, d in zip((queries, key, value), tangents, strict=True)]
    ends = [run(*qkv) for qkv in zip(*moved, strict=True)]
    torch.testing.assert_close(tangent, (ends[0] - ends[1]) / (2 * step), rtol=1e-7, atol=1e-7)


def test_lengths_that_differ_have_no_forward_mode() -> None:
    query, key, value = qkv()

    def derivative(cu_q: Tensor) -> Any:
        return jvp(lambda q: attend(q, key, value, cu_q, CU_K, 7, 6), (query,), (query,))[1]

    with pytest.raises(NotImplementedError, match="cu_seq_q: got a tensor whose numbers cannot be read"):
        torch.vmap(derivative)(torch.stack([CU_Q, CU_Q]))


def test_explain_under_vmap() -> None:
    query, key, value = qkv()
    plans = []
    torch.vmap(lambda q: (plans.append(scaledot.explain_varlen(q, key, value, CU_Q, CU_K, 4, 6)), q)[1])(
        query.expand(SAMPLES, *query.shape)
    )
    assert sum(choice.sequences for choice in plans[0].forward.kernels) == SAMPLES * 2  # the third has no rows


def test_per_sample_gradients_of_a_model() -> None:
    """A projection and packed attention, as in models that train on packed documents."""
    layer = torch.nn.Linear(8, 24, dtype=torch.float64)
    parameters = dict(layer.named_parameters())
    documents = normal(SAMPLES, 7, 8)

    def loss(parameters: Any, x: Tensor) -> Tensor:
        fused = torch.func.functional_call(layer, parameters, (x,)).unflatten(-1, (3, 2, 4))
        result: Tensor = attend(*fused.unbind(1), CU_Q, CU_Q, 4, 4, True).square().sum()
        return result

    with calls(varlen=1, varlen_backward=1):
        found = torch.vmap(grad(loss), in_dims=(None, 0))(parameters, documents)
    for i in range(SAMPLES):
        for name, wanted in grad(loss)(parameters, documents[i]).items():
            torch.testing.assert_close(found[name][i], wanted, rtol=1e-12, atol=1e-12)


def test_batched_gradients_of_torch_autograd() -> None:
    query, key, value = (t.requires_grad_() for t in qkv())
    output = attend(query, key, value, CU_Q, CU_K, 4, 6)
    cotangents = normal(SAMPLES, *output.shape)
    found = torch.autograd.grad(output, (query, key, value), cotangents, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(output, (query, key, value), g, retain_graph=True) for g in cotangents]
    assert_bits(found, tuple(torch.stack(g) for g in zip(*each, strict=True)))
