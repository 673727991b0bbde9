"""scaledot.merge_sinks: attention with one more key, of a given score and with a zero value."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import scaledot
import tolerances
from scaledot import merge_sinks, merge_states, scaled_dot_product_attention

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INFINITE = math.inf


def with_a_column(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """The formula: (output, lse, weights) with the sink as the scores' last column, which no value belongs to."""
    scores = (query @ key.mT / math.sqrt(query.size(-1))).masked_fill(~mask, -INFINITE)
    column = sinks.expand(scores.shape[:-1]).unsqueeze(-1)
    joined = torch.cat([scores, column.to(scores.dtype)], -1)
    weights = joined.softmax(-1)[..., :-1]
    return weights @ value, joined.logsumexp(-1), weights


def ours(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    out, weights, lse = scaled_dot_product_attention(query, key, value, mask, return_weights=True, return_lse=True)
    return merge_sinks(out, lse, sinks, weights)


def problem(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> list[Tensor]:
    """query, key, value, sinks; as the dtype has them, in float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 3, 5, 8), (2, 3, 9, 8), (2, 3, 9, 6), shape]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).double() for s in shapes]


def solve(attention: object, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output, lse, weights, and the gradients of query, key, value and sinks."""
    leaves = [t.to(dtype).requires_grad_() for t in inputs]
    mask = torch.arange(9) <= torch.arange(5)[:, None] + 2
    results = attention(*leaves, mask)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(9)
    cotangents = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) for r in results]
    return [*(r.detach() for r in results), *torch.autograd.grad(results, leaves, cotangents)]


@pytest.mark.parametrize("shape", [(3, 1), (2, 3, 5), ()], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_one_more_column(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    eager_dtype = torch.float32 if dtype == torch.float64 else dtype
    ratio = torch.finfo(dtype).eps / torch.finfo(eager_dtype).eps
    errors: list[list[float]] = []
    for seed in range(10):
        exact = solve(with_a_column, problem(dtype, shape, seed), torch.float64)
        eager = solve(with_a_column, problem(dtype, shape, seed), eager_dtype)
        errors.append([ratio * tolerances.error(e, x) for e, x in zip(eager, exact, strict=True)])
    exact = solve(with_a_column, problem(dtype, shape, 0), torch.float64)
    found = solve(ours, problem(dtype, shape, 0), dtype)
    assert [t.dtype for t in found[:3]] == [dtype, torch.promote_types(dtype, torch.float32), dtype]
    for number, (result, oracle) in enumerate(zip(found, exact, strict=True)):
        error = max(draw[number] for draw in errors)
        tolerances.check(f"result {number}", result, oracle, error, gradient=number > 2)


def test_is_merge_states_with_a_state_of_zeros() -> None:
    query, key, value, sinks = problem(torch.float64, (2, 3, 5), 0)
    out, lse = scaled_dot_product_attention(query, key, value, return_lse=True)
    torch.testing.assert_close(merge_sinks(out, lse, sinks), merge_states(out, lse, torch.zeros_like(out), sinks))


def test_nothing_to_attend_to() -> None:
    sinks = torch.tensor([0.5, -INFINITE, 0.5, -INFINITE], dtype=torch.float64, requires_grad=True)
    query, key, value = (torch.randn(1, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[True], [True], [False], [False]])
    out, lse, weights = ours(query, key, value, sinks, mask)
    plain, weight, plain_lse = scaled_dot_product_attention(
        query, key, value, mask, return_weights=True, return_lse=True
    )
    torch.testing.assert_close((out[0, 1], weights[0, 1], lse[0, 1]), (plain[0, 1], weight[0, 1], plain_lse[0, 1]))
    assert not out[0, 2:].any()
    assert not weights[0, 2:].any()
    assert lse[0, 2:].tolist() == [0.5, -INFINITE]
    for gradient in torch.autograd.grad(out.sum() + weights.square().sum() + lse[0, :3].sum(), (query, sinks)):
        assert gradient.isfinite().all()
    gradients = torch.autograd.grad(ours(query, key, value, sinks, mask)[0].sum(), (query, key, value, sinks))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_large_scores_do_not_overflow() -> None:
    out, lse = torch.ones(4, 1, dtype=torch.float64), torch.tensor([1000.0, 1000.0, -1000.0, 0.0], dtype=torch.float64)
    sinks = torch.tensor([1000.0, -1000.0, 1000.0, INFINITE], dtype=torch.float64)
    merged, both = merge_sinks(out, lse, sinks)
    torch.testing.assert_close(merged[:, 0], torch.tensor([0.5, 1.0, 0.0, 0.0], dtype=torch.float64))
    assert both.tolist() == [1000.0 + math.log(2), 1000.0, 1000.0, INFINITE]


def test_nan_is_passed_on() -> None:
    out, lse = merge_sinks(torch.ones(2, 3), torch.tensor([0.0, math.nan]), torch.tensor([math.nan, 0.0]))
    assert out.isnan().all()
    assert lse.isnan().all()


def test_gradcheck() -> None:
    shapes = [(2, 3, 4), (2, 3), (3,), (2, 3, 5)]
    arguments = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    assert torch.autograd.gradcheck(merge_sinks, arguments)
    assert torch.autograd.gradgradcheck(merge_sinks, arguments)


def test_is_exported() -> None:
    assert scaledot.merge_sinks is merge_sinks


OUT, LSE = torch.zeros(3, 4), torch.zeros(3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((OUT, torch.zeros(4), LSE), ValueError, r"lse: got shape \(4,\); needs \(3,\), that of out without"),
        ((OUT, LSE, torch.zeros(2)), ValueError, r"sinks: got shape \(2,\); needs one that broadcasts to \(3,\)"),
        ((OUT, LSE, torch.zeros(1, 3)), ValueError, r"sinks: got shape \(1, 3\)"),
        ((OUT, LSE, LSE, torch.zeros(2, 5)), ValueError, r"weights: got shape \(2, 5\); needs \(3,\) and"),
        ((OUT.int(), LSE, LSE), TypeError, "out: got dtype torch.int32"),
        ((OUT, LSE, 0.0), TypeError, "sinks: got 0.0, a float; needs a torch.Tensor"),
        ((OUT, LSE, LSE, LSE.bool()), TypeError, "weights: got dtype torch.bool"),
        ((OUT, LSE, LSE.to("meta")), RuntimeError, "sinks: got a tensor on meta; needs cpu, where out is"),
        ((torch.tensor(1.0), torch.tensor(1.0), LSE), ValueError, "out: got a tensor without dimensions"),
    ],
)
def test_errors(arguments: tuple[Tensor, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        merge_sinks(*arguments)
