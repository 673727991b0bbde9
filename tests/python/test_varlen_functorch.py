"""torch.func over packed sequences: vmap makes one call of the op, and each sample gets its own result bit for bit."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp
from torch.utils._python_dispatch import TorchDispatchMode

import scaledot
from varlen_cases import cumulative

pytestmark = [
    pytest.mark.filterwarnings("error:There is a performance drop"),  # torch warns if it runs an op once a sample
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]
SAMPLES = 3
ROWS, KEYS = (3, 0, 4), (2, 5, 6)
CU_Q, CU_K = cumulative(ROWS), cumulative(KEYS)
attend: Any = scaledot.varlen_attention


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def qkv(heads: int = 2, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return normal(sum(ROWS), heads, 4), normal(sum(KEYS), kv_heads, 4), normal(sum(KEYS), kv_heads, 3)


def samples_of(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.stack([torch.randn_like(t) for _ in range(SAMPLES)]) for t in tensors)


def looped(function: Any, in_dims: Any, *tensors: Tensor) -> Any:
    """What vmap(function, in_dims)(*tensors) means."""
    results = [
        function(*(t if d is None else t.select(d, i) for t, d in zip(tensors, in_dims, strict=True)))
        for i in range(SAMPLES)
    ]
    if isinstance(results[0], tuple):
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return torch.stack(results)


def assert_bits(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "scaledot":
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def calls(**wanted: int) -> Iterator[None]:
    """Exactly these calls of our ops reach the kernels."""
    with Calls() as mode:
        yield
    assert sorted(mode.names) == sorted(f"{name}.default" for name, n in wanted.items() for _ in range(n))


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


def dropped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    result: Tensor = attend(query, key, value, CU_Q, CU_K, 4, 6, dropout_p=0.4)
    return result


def test_dropout_error_mode_is_torchs() -> None:
    with pytest.raises(RuntimeError, match="randomness error mode"):
        torch.vmap(dropped)(*samples_of(*qkv()))


def test_dropout_same_mode_is_that_of_the_call_alone() -> None:
    queries, key, value = samples_of(qkv()[0])[0], *qkv()[1:]
    torch.manual_seed(3)
    with calls(varlen=1):
        found = torch.vmap(dropped, in_dims=(0, None, None), randomness="same")(queries, key, value)
    for i in range(SAMPLES):
        torch.manual_seed(3)
        assert_bits(found[i], dropped(queries[i], key, value))


@pytest.mark.parametrize("levels", [1, 2])
def test_dropout_different_mode(levels: int) -> None:
    query = torch.ones((2,) * (levels - 1) + (SAMPLES, sum(ROWS), 2, 4))
    key, value = torch.ones(sum(KEYS), 2, 4), torch.randn(sum(KEYS), 2, 8)
    function: Any = lambda q: dropped(q, key, value)  # noqa: E731
    for _ in range(levels):
        function = torch.vmap(function, randomness="different")
    with calls(varlen=1):
        outputs = function(query).flatten(0, levels - 1)
    assert len(torch.unique(outputs.flatten(1), dim=0)) == len(outputs)


@pytest.mark.parametrize("mode", ["same", "different"])
def test_dropout_has_gradients_of_the_same_mask(mode: str) -> None:
    """The output is linear in the values, so their gradient shows what was dropped."""
    query, key, _ = samples_of(*qkv())
    values = normal(SAMPLES, sum(KEYS), 2, 3)

    def output_and_gradient(value: Tensor, query: Tensor, key: Tensor) -> Any:
        output, pull = vjp(lambda v: dropped(query, key, v), value)
        return output.sum(), (pull(torch.ones_like(output))[0] * value).sum()

    with calls(varlen=1, varlen_backward=1):
        found, wanted = torch.vmap(output_and_gradient, randomness=mode)(values, query, key)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def run_op(query: Tensor, seeds: Tensor, cu_q: Tensor = CU_Q, cu_k: Tensor = CU_K) -> Any:
    rest = (None, None, None, seeds, 7, 13, 0.4)
    key = torch.linspace(-1, 1, 13 * 8, dtype=torch.float64).view(13, 2, 4)
    return torch.ops.scaledot.varlen(query, key, key, cu_q, cu_k, *rest)


def test_several_seeds_are_several_calls() -> None:
    """Each seed serves equally many consecutive sequences, also in the backward and the double backward."""
    cu_q, cu_k = cumulative((2, 1, 3, 1)), cumulative((3, 2, 4, 4))
    seeds, query = torch.randint(2**62, (2, 2)), qkv()[0]
    key = torch.linspace(-1, 1, 13 * 8, dtype=torch.float64).view(13, 2, 4)

    def halves(query: Tensor) -> Tensor:
        def half(rows: slice, keys: slice, cu_q: Tensor, cu_k: Tensor, seed: Tensor) -> Tensor:
            args = (query[rows], key[keys], key[keys], cu_q, cu_k, None, None, None, seed, 3, 4, 0.4)
            result: Tensor = torch.ops.scaledot.varlen(*args)[0]
            return result

        first = half(slice(3), slice(5), cumulative((2, 1)), cumulative((3, 2)), seeds[0])
        return torch.cat([first, half(slice(3, 7), slice(5, 13), cumulative((3, 1)), cumulative((4, 4)), seeds[1])])

    def whole(query: Tensor) -> Tensor:
        result: Tensor = run_op(query, seeds, cu_q, cu_k)[0]
        return result

    assert_bits(whole(query), halves(query))
    leaves = query.clone().requires_grad_(), query.clone().requires_grad_()
    assert_bits(*[torch.autograd.grad(f(q).square().sum(), q)[0] for f, q in zip((whole, halves), leaves, strict=True)])
    second, wanted = (hessian(lambda q, f=f: f(q).square().sum())(query) for f in (whole, halves))
    torch.testing.assert_close(second, wanted, rtol=1e-12, atol=1e-12)


def test_bad_seeds() -> None:
    for shape in ((2, 2), (3, 3, 2), (0, 2)):
        with pytest.raises(ValueError, match=r"dropout_seed: got shape .*needs \(2,\) or \(seeds, 2\)"):
            run_op(qkv()[0], torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize(
    "changes",
    [
        dict(key=torch.zeros(13, 2, 5)),
        dict(key=torch.zeros(13, 3, 4), value=torch.zeros(13, 3, 4)),
        dict(value=torch.zeros(12, 2, 4)),
        dict(key=torch.zeros(13, 2, 4, 1)),
        dict(cu_seq_q=torch.tensor([0, 3, 4, 6])),
        dict(cu_seq_q=torch.tensor([0, 3, 4, 8])),
        dict(cu_seq_q=torch.tensor([1, 3, 4, 7])),
        dict(cu_seq_q=torch.tensor([0, 4, 3, 7])),
        dict(cu_seq_q=torch.tensor([0.0, 3, 4, 7])),
        dict(cu_seq_q=torch.tensor([], dtype=torch.int64)),
        dict(cu_seq_k=torch.tensor([0, 2, 7, 12])),
        dict(cu_seq_k=torch.tensor([0, 2, 13])),
        dict(cu_seq_k=None),
        dict(max_q=3),
        dict(seqused_k=torch.tensor([2, 6, 6])),
        dict(seqused_k=torch.tensor([2, 5])),
        dict(alibi_slopes=torch.ones(2, 2)),
        dict(alibi_slopes=torch.ones(3, 3, 2)),
        dict(scale=float("inf")),
    ],
    ids=lambda changes: "".join(f"{k}={list(v.shape) if isinstance(v, Tensor) else v}" for k, v in changes.items()),
)
def test_errors_are_those_of_one_sample(changes: dict[str, Any]) -> None:
    query, key, value = torch.randn(7, 2, 4), torch.randn(13, 2, 4), torch.randn(13, 2, 4)
    arguments = dict(key=key, value=value, cu_seq_q=CU_Q, cu_seq_k=CU_K, max_q=4, max_k=6) | changes

    def run(query: Tensor) -> Any:
        return attend(query, **arguments)

    with pytest.raises((TypeError, ValueError)) as alone:
        run(query)
    with pytest.raises(type(alone.value)) as batched:
        torch.vmap(run)(query.expand(SAMPLES, 7, 2, 4))
    assert str(batched.value) == str(alone.value)


@pytest.mark.parametrize("bad", [[0, 3, 4, 6], [0, 3, 4, 8], [1, 3, 4, 7]])
@pytest.mark.parametrize("place", range(SAMPLES))
def test_wrong_lengths_of_one_sample_do_not_become_right_beside_others(bad: list[int], place: int) -> None:
    cu_q = CU_Q.repeat(SAMPLES, 1)
    cu_q[place] = torch.tensor(bad)
    queries, key, value = samples_of(qkv()[0])[0], *qkv()[1:]
    with pytest.raises(ValueError, match=r"cu_seq_q: (starts|ends) with"):
        torch.vmap(lambda q, cu: attend(q, key, value, cu, CU_K, 7, 6))(queries, cu_q)


@pytest.mark.parametrize("page", [-1, 4])
def test_pages_of_another_sample_cannot_be_reached(page: int) -> None:
    query, pool = normal(1, 2, 4), normal(SAMPLES, 4, 3, 2, 4)
    tables = torch.tensor([[[2, 0]], [[page, 1]], [[1, 3]]])

    def run(pool: Tensor, table: Tensor) -> Any:
        used = torch.tensor([5])
        return attend(query, pool, pool, cumulative((1,)), None, 1, 6, seqused_k=used, block_table=table)

    with pytest.raises(ValueError, match=rf"block_table: got page {page} at \[0, 0\]; needs a number from 0 to 3"):
        torch.vmap(run)(pool, tables)


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
