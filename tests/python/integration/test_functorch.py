"""torch.vmap over the ops: one call for all samples, whatever is batched, with the results of one call a sample."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp

import scaledot
from op_calls import Calls

# The first is torch's warning when it runs an op once for each sample.
pytestmark = [
    pytest.mark.filterwarnings("error:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]
SAMPLES = 3
attend: Any = scaledot.scaled_dot_product_attention


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def looped(function: Any, *batched: Tensor) -> Any:
    """The meaning of vmap(function)(*batched)."""
    results = [function(*(t[i] for t in batched)) for i in range(len(batched[0]))]
    if isinstance(results[0], tuple):
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return torch.stack(results)


def assert_same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@contextlib.contextmanager
def calls(**wanted: int) -> Iterator[None]:
    """Exactly these calls of our ops reach the kernels."""
    with Calls() as mode:
        yield
    assert {name: mode.count(name) for name in wanted} == wanted


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "2d": ((4, 3), (5, 3), (5, 2), {}),
    "3d": ((2, 4, 3), (2, 5, 3), (2, 5, 2), {"is_causal": True}),
    "4d": ((2, 2, 4, 3), (2, 2, 5, 3), (2, 2, 5, 2), {"window": (1, 2), "softcap": 2.0}),
    "5d": ((2, 1, 2, 4, 3), (1, 3, 2, 5, 3), (3, 2, 5, 2), {}),
    "mixed": ((4, 3), (2, 5, 3), (5, 2), {}),
    "gqa": ((2, 4, 4, 3), (2, 2, 5, 3), (2, 1, 5, 2), {"enable_gqa": True}),
}


@pytest.mark.parametrize("batched", ["qkv", "q", "k", "v", "qv", "kv"])
@pytest.mark.parametrize("name", SHAPES)
def test_forward_and_gradients_of_each_sample(name: str, batched: str) -> None:
    """Tensors that are not batched also get a gradient for each sample."""
    *shapes, options = SHAPES[name]
    batch = [SAMPLES if letter in batched else None for letter in "qkv"]
    tensors = [normal(*((b,) if b else ()), *shape) for b, shape in zip(batch, shapes, strict=True)]

    def loss(*qkv: Tensor) -> Any:
        output, weights, lse = attend(*qkv, **options, return_weights=True, return_lse=True)
        return output.square().sum() + weights.square().sum() + lse.sum(), (output, weights, lse)

    each = grad(loss, argnums=(0, 1, 2), has_aux=True)
    in_dims = tuple(0 if b else None for b in batch)
    with calls(sdpa=1, sdpa_backward=1):
        found = torch.vmap(each, in_dims=in_dims)(*tensors)
    for i in range(SAMPLES):
        wanted = each(*(t[i] if b else t for t, b in zip(tensors, batch, strict=True)))
        for mine, right in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
            assert_same(mine[i], right)


@pytest.mark.parametrize("mask_shape", [(4, 5), (5,), (1, 5), (2, 1, 5), (2, 2, 4, 5), ()])
@pytest.mark.parametrize("what", ["mask", "both", "query"])
def test_masks(what: str, mask_shape: tuple[int, ...]) -> None:
    query = normal(SAMPLES, 2, 2, 4, 3) if what != "mask" else normal(2, 2, 4, 3)
    mask = normal(SAMPLES, *mask_shape) if what != "query" else normal(*mask_shape)
    key, value = normal(2, 5, 3), normal(2, 5, 2)
    in_dims = (None if what == "mask" else 0, None if what == "query" else 0)

    def loss(query: Tensor, mask: Tensor) -> Tensor:
        return attend(query, key, value, mask).square().sum()

    with calls(sdpa=1, sdpa_backward=1):
        found = torch.vmap(grad(loss, argnums=(0, 1)), in_dims=in_dims)(query, mask)
    for i in range(SAMPLES):
        wanted = grad(loss, argnums=(0, 1))(query if what == "mask" else query[i], mask if what == "query" else mask[i])
        assert_same((found[0][i], found[1][i]), wanted)

    allowed = normal(*mask.shape) > 0
    with calls(sdpa=1):
        output = torch.vmap(lambda q, m: attend(q, key, value, m), in_dims=in_dims)(query, allowed)
    for i in range(SAMPLES):
        one = query if what == "mask" else query[i], allowed if what == "query" else allowed[i]
        assert_same(output[i], attend(one[0], key, value, one[1]))


@pytest.mark.parametrize("shape", [(2,), (2, 2), (1,)])
def test_alibi(shape: tuple[int, ...]) -> None:
    query, key, slopes = normal(SAMPLES, 2, 2, 4, 3), normal(2, 2, 5, 3), torch.rand(SAMPLES, *shape)
    for in_dims in ((0, 0), (None, 0), (0, None)):
        q, s = (t if d == 0 else t[0] for t, d in zip((query, slopes), in_dims, strict=True))
        with calls(sdpa=1):
            found = torch.vmap(lambda q, s: attend(q, key, key, alibi_slopes=s), in_dims=in_dims)(q, s)
        for i in range(SAMPLES):
            one = (t[i] if d == 0 else t for t, d in zip((q, s), in_dims, strict=True))
            assert_same(found[i], (lambda q, s: attend(q, key, key, alibi_slopes=s))(*one))


def test_in_dims_out_dims_chunks_and_nesting() -> None:
    query, key, value = normal(SAMPLES, 2, 2, 4, 3), normal(SAMPLES, 2, 2, 5, 3), normal(SAMPLES, 2, 2, 5, 2)
    wanted = attend(query, key, value)
    moved = query.movedim(0, 1), key.movedim(0, -1), value.movedim(0, 2)
    assert_same(torch.vmap(attend, in_dims=(1, -1, 2), out_dims=3)(*moved), wanted.movedim(0, 3))
    assert_same(torch.vmap(attend, chunk_size=2)(query, key, value), wanted)
    with calls(sdpa=1):
        assert_same(torch.vmap(torch.vmap(torch.vmap(attend)))(query, key, value), wanted)
    # An outer product of samples: each level batches another tensor.
    pairs = torch.vmap(torch.vmap(attend, in_dims=(None, 0, 0)), in_dims=(0, None, None))
    with calls(sdpa=1):
        found = pairs(query, key, value)
    wanted = [torch.stack([attend(q, *kv) for kv in zip(key, value, strict=True)]) for q in query]
    assert_same(found, torch.stack(wanted))


@pytest.mark.parametrize("transform", ["jacrev", "jacfwd", "hessian", "vjp", "jvp", "rev of fwd", "fwd of rev"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "softcap": 2.0}], ids=["plain", "causal softcap"])
def test_transforms_inside_and_outside_of_vmap(transform: str, options: dict[str, Any]) -> None:
    queries, key, value = normal(SAMPLES, 3, 2), normal(4, 2), normal(4, 2)

    def loss(query: Tensor) -> Tensor:
        return attend(query, key, value, **options).square().sum()

    apply: dict[str, Any] = {
        "jacrev": lambda q: jacrev(lambda x: attend(x, key, value, **options))(q),
        "jacfwd": lambda q: jacfwd(lambda x: attend(x, key, value, **options))(q),
        "hessian": hessian(loss),
        "vjp": lambda q: vjp(loss, q)[1](torch.ones((), dtype=q.dtype))[0],
        "jvp": lambda q: jvp(loss, (q,), (q.cos(),))[1],
        "rev of fwd": jacrev(jacfwd(loss)),
        "fwd of rev": jacfwd(jacrev(loss)),
    }
    one = apply[transform]
    assert_same(torch.vmap(one)(queries), looped(one, queries))
    if transform == "hessian":  # of all samples' losses together: the samples do not mix
        whole = hessian(lambda q: torch.vmap(loss)(q).sum())(queries)
        for i in range(SAMPLES):
            assert_same(whole[i, :, :, i], one(queries[i]))


def test_batched_gradients_of_torch_autograd() -> None:
    query = normal(2, 3, 2).requires_grad_()
    output = attend(query, query, query)
    cotangents = normal(SAMPLES, *output.shape)
    # Here torch uses the vmap from before torch.func, which calls our op once for each gradient.
    (found,) = torch.autograd.grad(output, query, cotangents, is_grads_batched=True, retain_graph=True)
    wanted = [torch.autograd.grad(output, query, g, retain_graph=True)[0] for g in cotangents]
    assert_same(found, torch.stack(wanted))
    vectorized = torch.autograd.functional.jacobian(lambda q: attend(q, q, q), query.detach(), vectorize=True)
    assert_same(vectorized, torch.autograd.functional.jacobian(lambda q: attend(q, q, q), query.detach()))


def test_gradcheck_batched() -> None:
    query, key, mask = (normal(*s).requires_grad_() for s in ((2, 3, 2), (2, 4, 2), (3, 4)))
    torch.autograd.gradcheck(lambda q, k, m: attend(q, k, k, m), (query, key, mask), check_batched_grad=True)
    torch.autograd.gradgradcheck(lambda q, k, m: attend(q, k, k, m), (query, key, mask), check_batched_grad=True)


def dropped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    result: Tensor = attend(query, key, value, dropout_p=0.4)
    return result


def test_dropout_error_mode_is_torchs() -> None:
    with pytest.raises(RuntimeError, match="randomness error mode"):
        torch.vmap(dropped)(*(normal(SAMPLES, 2, 4, 3) for _ in range(3)))


def test_dropout_same_mode() -> None:
    """Every sample drops what one call drops, also if samples have batch dimensions."""
    query, key, value = normal(SAMPLES, 2, 2, 4, 3), normal(2, 2, 5, 3), normal(2, 2, 5, 2)
    torch.manual_seed(3)
    with calls(sdpa=1):
        found = torch.vmap(dropped, in_dims=(0, None, None), randomness="same")(query, key, value)
    for i in range(SAMPLES):
        torch.manual_seed(3)
        assert_same(found[i], dropped(query[i], key, value))


@pytest.mark.parametrize("levels", [1, 2])
def test_dropout_different_mode(levels: int) -> None:
    query, value = torch.ones(SAMPLES, 64, 2, 8), torch.ones(SAMPLES, 64, 8, 1)
    function = dropped
    for _ in range(levels):
        function = torch.vmap(function, randomness="different")
    with calls(sdpa=1):
        outputs = function(query, query[:, :, :1].expand(SAMPLES, 64, 8, 8), value)
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])
    assert 0.9 < outputs.mean() < 1.1  # kept weights are scaled up
    per_head = outputs.flatten(0, 1)
    assert len(torch.unique(per_head.flatten(1), dim=0)) > 20  # about 80 differ


def test_dropout_has_gradients_of_the_same_mask() -> None:
    query, key, value = (normal(SAMPLES, 2, 4, 3) for _ in range(3))

    def loss(value: Tensor, query: Tensor, key: Tensor) -> Any:
        output, weights = attend(query, key, value, dropout_p=0.4, return_weights=True)
        return output.sum(), weights

    for mode in ("same", "different"):
        with calls(sdpa=1, sdpa_backward=1):
            found, weights = torch.vmap(grad(loss, has_aux=True), randomness=mode)(value, query, key)
        assert_same(found, weights.sum(-2)[..., None].expand_as(value))
        assert (weights == 0).any()
        hidden = [w == 0 for w in weights]
        assert torch.equal(hidden[0], hidden[1]) == (mode == "same")


def test_a_batch_of_seeds_is_a_call_each() -> None:
    """The op itself takes seeds for the first batch dimensions."""
    query = normal(SAMPLES, 2, 2, 4, 3)
    seeds = torch.randint(2**62, (SAMPLES, 2))
    both = torch.ops.scaledot.sdpa(query, query, query, dropout_seed=seeds, dropout_p=0.4, return_weights=True)
    each = [
        torch.ops.scaledot.sdpa(q, q, q, dropout_seed=s, dropout_p=0.4, return_weights=True)
        for q, s in zip(query, seeds, strict=True)
    ]
    for found, wanted in zip(both, zip(*each, strict=True), strict=True):
        assert torch.equal(found, torch.stack(wanted))
    inner = torch.randint(2**62, (SAMPLES, 2, 2))
    found = torch.ops.scaledot.sdpa(query, query, query, dropout_seed=inner, dropout_p=0.4)[0]
    one = torch.ops.scaledot.sdpa(query[1, 1], query[1, 1], query[1, 1], dropout_seed=inner[1, 1], dropout_p=0.4)[0]
    assert torch.equal(found[1, 1], one)
    batched = torch.vmap(lambda q, s: torch.ops.scaledot.sdpa(q, q, q, dropout_seed=s, dropout_p=0.4)[0])
    alone = torch.ops.scaledot.sdpa(query, query, query, dropout_seed=seeds, dropout_p=0.4)[0]
    assert torch.equal(batched(query, seeds), alone)


def test_dropout_double_backward_and_forward_mode_see_the_same_mask() -> None:
    query, seeds = normal(SAMPLES, 2, 3, 2), torch.randint(2**62, (SAMPLES, 2))

    def loss(query: Tensor, seed: Tensor) -> Tensor:
        output: Tensor = torch.ops.scaledot.sdpa(query, query, query, dropout_seed=seed, dropout_p=0.3)[0]
        return output.square().sum()

    assert_same(torch.vmap(hessian(loss))(query, seeds), looped(hessian(loss), query, seeds))


@pytest.mark.parametrize(
    "call",
    [
        lambda q: attend(q, torch.zeros(2, 2, 5, 7, dtype=q.dtype), torch.zeros(2, 2, 5, 7, dtype=q.dtype)),
        lambda q: attend(q, q, q, torch.zeros(SAMPLES, 2, 2, 4, 4)),
        lambda q: attend(q, q, q, alibi_slopes=torch.ones(SAMPLES, 2, 2)),
        lambda q: attend(q, q, q.float()),
        lambda q: attend(q, q, q, scale=float("inf")),
    ],
    ids=["shape", "mask of more dimensions", "slopes of more dimensions", "dtype", "option"],
)
def test_errors_are_those_of_one_sample(call: Any) -> None:
    query = normal(SAMPLES, 2, 2, 4, 3)
    with pytest.raises((TypeError, ValueError)) as alone:
        call(query[0])
    with pytest.raises(type(alone.value)) as batched:
        torch.vmap(call)(query)
    assert str(batched.value) == str(alone.value)


def test_explain_under_vmap() -> None:
    query = normal(SAMPLES, 2, 2, 4, 3)
    plans = []
    torch.vmap(lambda q: (plans.append(scaledot.explain(q, q, q)), q)[1])(query)
    assert "forward" in str(plans[0])


def test_module_of_an_ensemble() -> None:
    """torch.func.functional_call over stacked parameters: model ensembling as torch's tutorial does it."""
    layers = [scaledot.MultiHeadAttention(8, 2, dtype=torch.float64) for _ in range(SAMPLES)]
    parameters, buffers = torch.func.stack_module_state(layers)
    x = normal(2, 5, 8)

    def call(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(layers[0], (parameters, buffers), (x,), {"is_causal": True})[0]
        return result

    with calls(sdpa=1):
        found = torch.vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)
    assert_same(found, torch.stack([layer(x, is_causal=True)[0] for layer in layers]))


def test_per_sample_gradients_of_a_module() -> None:
    layer = scaledot.MultiHeadAttention(8, 2, dtype=torch.float64)
    parameters = dict(layer.named_parameters())
    xs = normal(SAMPLES, 5, 8)

    def loss(parameters: Any, x: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(layer, parameters, (x,))[0].square().sum()
        return result

    with calls(sdpa=1, sdpa_backward=1):
        found = torch.vmap(grad(loss), in_dims=(None, 0))(parameters, xs)
    for i in range(SAMPLES):
        for name, wanted in grad(loss)(parameters, xs[i]).items():
            assert_same(found[name][i], wanted)
