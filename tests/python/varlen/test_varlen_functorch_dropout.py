"""torch.func over packed sequences: dropout's modes, seeds, and the errors of single samples."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import hessian, vjp

from varlen_cases import cumulative
from varlen_samples import CU_K, CU_Q, KEYS, ROWS, SAMPLES, assert_bits, attend, calls, normal, qkv, samples_of

pytestmark = [
    pytest.mark.filterwarnings("error:There is a performance drop"),  # torch warns if it runs an op once a sample
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]


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
    rest = (None, None, None, seeds, None, None, None, None, 7, 13, 0.4)
    key = torch.linspace(-1, 1, 13 * 8, dtype=torch.float64).view(13, 2, 4)
    return torch.ops.scaledot.varlen(query, key, key, cu_q, cu_k, *rest)


def test_several_seeds_are_several_calls() -> None:
    """Each seed serves equally many consecutive sequences, also in the backward and the double backward."""
    cu_q, cu_k = cumulative((2, 1, 3, 1)), cumulative((3, 2, 4, 4))
    seeds, query = torch.randint(2**62, (2, 2)), qkv()[0]
    key = torch.linspace(-1, 1, 13 * 8, dtype=torch.float64).view(13, 2, 4)

    def halves(query: Tensor) -> Tensor:
        def half(rows: slice, keys: slice, cu_q: Tensor, cu_k: Tensor, seed: Tensor) -> Tensor:
            args = (query[rows], key[keys], key[keys], cu_q, cu_k, *[None] * 3, seed, *[None] * 4, 3, 4, 0.4)
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
    with pytest.raises(ValueError, match=r"cu_seq_q: got \d as its (first|last) number"):
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
