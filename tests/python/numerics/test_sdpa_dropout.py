"""Dropout: the same seed gives the same mask on every kernel; statistics; seeds come from torch's generator."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import reference
import scaledot
from cases import Case
from kernels_under_test import assert_runs, pairs, sdpa
from oracle import keep_mask


def kept(seed: tuple[int, int], shape: tuple[int, int, int, int], p: float) -> torch.Tensor:
    result: torch.Tensor = torch.ops.scaledot.dropout_mask(torch.tensor(seed), *shape, p)
    return result


@pytest.mark.parametrize("seed", [(0, 0), (1, 0), (0, 1), (-1, -1), (2**62 + 12345, 2**40 + 7), (-(2**63), 2**31)])
@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.99])
def test_the_op_draws_the_mask_of_the_independent_philox(seed: tuple[int, int], p: float) -> None:
    shape = (2, 3, 5, 201)
    assert torch.equal(kept(seed, shape, p), reference.philox_keep_mask(seed, *shape, p))
    assert abs(float(kept(seed, (4, 4, 64, 64), p).double().mean()) - (1 - p)) < 5 * math.sqrt(p * (1 - p) / 65536)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A],
        ),
    ],
)
def test_the_independent_philox_has_the_published_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    """The known answers for Philox4x32-7 that its authors publish with Random123."""
    assert [int(w) for w in reference._philox([torch.tensor(c) for c in counter], key)] == words


SAME_MASK = [
    Case(
        f"same mask {rows}x{keys} {dtype}",
        query_length=rows,
        key_length=keys,
        dropout_p=0.35,
        return_weights=True,
        dtype=dtype,
    )
    for rows, keys in [(1, 1), (3, 64), (33, 65), (130, 127), (2, 700)]
    for dtype in ["float32", "float64", "bfloat16", "float16"]
]


@pytest.mark.parametrize(("case", "kernel"), pairs(SAME_MASK, ("forward",)), indirect=["kernel"])
def test_every_kernel_drops_the_same_weights(case: Case, kernel: str) -> None:
    inputs = case.make()
    assert_runs(kernel, case, inputs)
    weights = sdpa(case, inputs)[2]
    keep = keep_mask(case, inputs)
    assert keep is not None
    assert torch.equal(weights != 0, keep)


def test_saved_softmax_are_scaled_and_lse_is_unchanged(kernel: str) -> None:
    case = Case("scaled", dropout_p=0.25, return_weights=True, dtype="float64")
    inputs = case.make()
    _, lse, weights = sdpa(case, inputs)
    plain = case.with_(dropout_p=0.0)
    inputs.dropout_seed = None
    _, lse_plain, weights_plain = sdpa(plain, inputs)
    torch.testing.assert_close(lse, lse_plain, rtol=1e-14, atol=0)
    kept_ones = weights != 0
    torch.testing.assert_close(weights[kept_ones], weights_plain[kept_ones] / 0.75, rtol=1e-13, atol=0)


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5, 0.9])
def test_drop_rate_and_independence_of_neighbours(p: float) -> None:
    """A million draws: the rate is right and neighbours are uncorrelated, within five standard deviations."""
    keep = kept((20261121, 3), (8, 8, 128, 128), p).double()
    count = keep.numel()
    deviation = math.sqrt(p * (1 - p) / count)
    assert abs(keep.mean() - (1 - p)) < 5 * deviation
    centred = (keep - (1 - p)) / math.sqrt(p * (1 - p))
    for dim in range(4):
        for step in (1, 2, 4, 16, 64):
            if step < centred.size(dim):
                product = centred.narrow(dim, step, centred.size(dim) - step) * centred.narrow(
                    dim, 0, centred.size(dim) - step
                )
                assert abs(product.mean()) < 5 / math.sqrt(product.numel()), (dim, step)
    for dim in range(4):  # the rate within each row, column, head and batch entry
        others = tuple(d for d in range(4) if d != dim)
        assert ((keep.mean(others) - (1 - p)).abs() < 6 * deviation * math.sqrt(keep.size(dim))).all()


def test_different_seeds_and_offsets_give_unrelated_masks() -> None:
    shape, masks = (1, 2, 64, 64), []
    for seed in ((0, 0), (1, 0), (2**32, 0), (0, 1), (5, 5)):
        masks.append(kept(seed, shape, 0.5).double() * 2 - 1)
    for i, a in enumerate(masks):
        for b in masks[i + 1 :]:
            assert abs((a * b).mean()) < 5 / math.sqrt(a.numel())


def test_dropout_of_zero_or_nearly_zero_keeps_everything() -> None:
    assert kept((9, 9), (1, 1, 50, 50), 0.0).all()
    assert kept((9, 9), (2, 2, 100, 100), 1e-12).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("sizes", [(1, 40), (3, 64), (33, 65), (130, 127), (2, 700)])
def test_dropout_of_everything(sizes: tuple[int, int], dtype: str, kernel: str) -> None:
    """Output, weights and their gradients are 0, never NaN; lse and its gradients are those without dropout."""
    case = Case("all dropped", query_length=sizes[0], key_length=sizes[1], mask="float", dropout_p=1.0, dtype=dtype)
    inputs = case.make().requiring_grad()
    output, lse, weights = sdpa(case, inputs, return_weights=True)
    assert (output == 0).all()
    assert (weights == 0).all()
    leaves = list(inputs.differentiable().values())
    for result in (output, weights):
        for grad in torch.autograd.grad(result.sum(), leaves, retain_graph=True, allow_unused=True):
            assert grad is None or (grad == 0).all()
    plain = case.with_(dropout_p=0.0)
    plain_lse = sdpa(plain, inputs)[1]
    eps = 8 * max(torch.finfo(case.torch_dtype).eps, torch.finfo(lse.dtype).eps)
    torch.testing.assert_close(lse, plain_lse, rtol=eps, atol=eps)
    found = torch.autograd.grad((lse * 2).sum() + output.sum(), leaves, allow_unused=True)
    wanted = torch.autograd.grad((plain_lse * 2).sum(), leaves, allow_unused=True)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs, rtol=eps, atol=eps)


def everything_dropped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    seed = torch.tensor([3, 4])
    results: tuple[torch.Tensor, ...] = torch.ops.scaledot.sdpa(
        query, key, value, dropout_seed=seed, dropout_p=1.0, return_weights=True
    )
    return results


def test_dropout_of_everything_in_every_mode() -> None:
    inputs = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64, requires_grad=True).unbind()
    assert torch.autograd.gradcheck(everything_dropped, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(everything_dropped, inputs)
    torch.library.opcheck(
        torch.ops.scaledot.sdpa.default,
        tuple(inputs),
        {"dropout_seed": torch.tensor([3, 4]), "dropout_p": 1.0, "return_weights": True},
    )
    compiled = torch.compile(everything_dropped, fullgraph=True, backend="aot_eager")
    for ours, wanted in zip(compiled(*inputs), everything_dropped(*inputs), strict=True):
        torch.testing.assert_close(ours, wanted)
    batched = torch.func.vmap(everything_dropped)(*(t.detach()[None] for t in inputs))
    assert (batched[0] == 0).all()


@pytest.mark.parametrize("shape", [(1, 1, 50, 50), (2, 3, 5, 201)])
def test_the_mask_of_dropout_of_everything_is_empty(shape: tuple[int, int, int, int]) -> None:
    assert not kept((9, 9), shape, 1.0).any()
    assert not reference.philox_keep_mask((9, 9), *shape, 1.0).any()


def test_dropout_of_everything_by_all_functions() -> None:
    query, key, value = torch.randn(3, 2, 4, 6, 8).unbind()
    for p in (1, 1.0):
        output = scaledot.scaled_dot_product_attention(query, key, value, dropout_p=p)
        assert torch.equal(output, torch.nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=1.0))
        assert scaledot.explain(query, key, value, dropout_p=p).forward.kernel
    packed, cu_seq = torch.randn(3, 7, 4, 8, requires_grad=True).unbind(), torch.tensor([0, 3, 7])
    output, lse = scaledot.varlen_attention(*packed, cu_seq, cu_seq, 4, 4, dropout_p=1.0, return_lse=True)
    plain = scaledot.varlen_attention(*packed, cu_seq, cu_seq, 4, 4, return_lse=True)[1]
    assert (output == 0).all()
    torch.testing.assert_close(lse, plain)
    for grad in torch.autograd.grad(output.sum(), packed, allow_unused=True):
        assert grad is None or (grad == 0).all()
    attention = scaledot.MultiHeadAttention(16, 4, dropout=1.0)
    x = torch.randn(2, 5, 16)
    output, weights = attention(x, need_weights=True)
    assert weights is not None
    assert (weights == 0).all()
    assert attention.out_proj is not None
    torch.testing.assert_close(output, attention.out_proj.bias.expand_as(output))


def test_mean_over_seeds_is_the_result_without_dropout(kernel: str) -> None:
    case = Case("expectation", batch=(1,), heads=1, query_length=4, key_length=6, head_dim=4, dropout_p=0.3)
    inputs = case.make()
    outputs = []
    for seed in range(1500):
        inputs.dropout_seed = torch.tensor([seed, 0])
        outputs.append(sdpa(case, inputs)[0])
    stacked = torch.stack(outputs)
    inputs.dropout_seed = None
    plain = sdpa(case.with_(dropout_p=0.0), inputs)[0]
    assert ((stacked.mean(0) - plain).abs() < 5 * stacked.std(0) / math.sqrt(len(outputs)) + 1e-6).all()


def public(inputs, p: float = 0.4):  # type: ignore[no-untyped-def]
    return scaledot.scaled_dot_product_attention(
        inputs.query, inputs.key, inputs.value, dropout_p=p, return_weights=True
    )


def test_manual_seed_reproduces_masks_and_the_generator_advances() -> None:
    inputs = Case("generator").make()
    torch.manual_seed(5)
    first, second = public(inputs), public(inputs)
    assert not torch.equal(first[1], second[1]), "two calls in a row must draw two masks"
    torch.manual_seed(5)
    assert torch.equal(public(inputs)[1], first[1])
    assert torch.equal(public(inputs)[1], second[1])
    state = torch.get_rng_state()
    public(inputs, 0.0)
    assert torch.equal(torch.get_rng_state(), state), "without dropout nothing is drawn"
    public(inputs)
    assert not torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(state)
    third = public(inputs)
    torch.set_rng_state(state)
    assert torch.equal(public(inputs)[0], third[0])


def test_fork_rng_leaves_the_outer_generator_unchanged() -> None:
    inputs = Case("fork_rng").make()
    torch.manual_seed(7)
    with torch.random.fork_rng():
        public(inputs)
    inside = public(inputs)[1]
    torch.manual_seed(7)
    assert torch.equal(public(inputs)[1], inside)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_replays_the_mask(use_reentrant: bool) -> None:
    def gradients(checkpointed: bool) -> list[torch.Tensor]:
        inputs = Case("checkpoint").make().requiring_grad()
        torch.manual_seed(3)

        def block(query: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = scaledot.scaled_dot_product_attention(query, inputs.key, inputs.value, dropout_p=0.5)
            return scaledot.scaled_dot_product_attention(out, inputs.key, inputs.value, dropout_p=0.5)

        out = checkpoint(block, inputs.query, use_reentrant=use_reentrant) if checkpointed else block(inputs.query)
        out.square().sum().backward()
        return [out.detach(), *(t.grad for t in inputs.differentiable().values() if t.grad is not None)]

    plain, replayed = gradients(False), gradients(True)
    assert len(plain) == 4
    for a, b in zip(plain, replayed, strict=True):
        assert torch.equal(a, b)


def test_the_seed_tensor_is_not_changed(kernel: str) -> None:
    case = Case("seed argument", dropout_p=0.5)
    inputs = case.make()
    assert inputs.dropout_seed is not None
    before, state = inputs.dropout_seed.clone(), torch.get_rng_state()
    assert torch.equal(sdpa(case, inputs)[0], sdpa(case, inputs)[0])
    assert torch.equal(inputs.dropout_seed, before)
    assert torch.equal(torch.get_rng_state(), state)
