"""Packed sequences: each has the same bits as in a call on it alone, for any neighbours and any number of threads, and
obeys the numerics rule against the float64 oracle."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen as torch_varlen

import oracle
import scaledot
from cases import DTYPES, Case, Inputs
from kernels_under_test import forced, sdpa
from varlen_cases import FEATURES, Call, Packed, call, cumulative


def assert_alone(made: Call, results: tuple[Tensor, Tensor], gradients: list[dict[str, Tensor]] | None = None) -> None:
    """Compares every sequence with a call on it alone that keeps no weights, bitwise."""
    cases, cotangents = made.packed.cases(), made.packed.cotangents()
    for b, (output, lse) in enumerate(made.results(results)):
        alone = made.inputs[b].mapped(lambda t: t).requiring_grad()
        with scaledot.save_for_backward(False):
            wanted = sdpa(cases[b], alone)
        assert torch.equal(output, wanted[0]), f"output of sequence {b}"
        assert torch.equal(lse, wanted[1]), f"lse of sequence {b}"
        if gradients is None:
            continue
        tensors = alone.differentiable()
        tensors.pop("relative_bias", None)  # a sum over all sequences
        grads = torch.autograd.grad(wanted[:2], list(tensors.values()), (cotangents[b].output, cotangents[b].lse))
        for name, grad in zip(tensors, grads, strict=True):
            grad = oracle.of_last_columns(cases[b], grad) if name == "attn_mask" else grad
            assert torch.equal(gradients[b][name], grad), f"gradient of {name} of sequence {b}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", FEATURES)
def test_each_sequence_has_the_bits_of_a_call_alone(feature: str, dtype: str) -> None:
    made = call(Packed(f"varlen {feature}", common={**FEATURES[feature], "dtype": dtype}))
    results = made.run()
    assert_alone(made, results, made.gradients(results))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", ["causal", "gqa", "softcap_scale", "tree", "tree_heads", "tree_bias"])
def test_each_sequence_obeys_the_numerics_rule(feature: str, dtype: str) -> None:
    made = call(Packed(f"varlen oracle {feature}", (19, 3), (30, 21), {**FEATURES[feature], "dtype": dtype}))
    results = made.run()
    gradients = made.gradients(results)
    for b, case in enumerate(made.packed.cases()):
        solution = oracle.solve(case, b)
        output, lse = made.results(results)[b]
        solution.check("output", output)
        solution.check("lse", lse)
        for name, gradient in gradients[b].items():
            solution.check(name, gradient)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_sequence_has_the_bits_of_a_call_alone_on_every_kernel(dtype: str, kernel: str) -> None:
    common = {**FEATURES["everything"], "dtype": dtype}
    made = call(Packed("varlen kernels", (20, 1, 33), (20, 40, 50), common))
    results = made.run()
    assert_alone(made, results, made.gradients(results))


# Many: each thread takes whole sequences. Few: all threads share a sequence. Mixed and decode: both.
THREADS = {
    "many": Packed("varlen many", tuple(range(1, 60)), tuple(range(60, 1, -1))),
    "few": Packed("varlen few", (200, 180), (170, 210), dict(causal=True)),
    "mixed": Packed("varlen mixed", (300, *[7] * 20), (300, *[30] * 20), dict(dropout_p=0.2)),
    "decode": Packed("varlen decode", (1, 1, 2), (1500, 40, 900), dict(heads=4, kv_heads=2, enable_gqa=True)),
    "tree": Packed("varlen tree", (16, 60, 9), (1500, 300, 900), FEATURES["tree"]),
    "bias": Packed("varlen bias", (160, 60, 1, 9), (160, 200, 90, 5), FEATURES["tree_bias"]),
}


@pytest.mark.parametrize("name", THREADS)
def test_same_bits_for_any_number_of_threads(name: str) -> None:
    made = call(THREADS[name])
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results = made.run()
        inputs = [t for t in (made.query, made.key, made.value, made.attn_mask) if t is not None and t.requires_grad]
        gradients = torch.autograd.grad(results, inputs, [r.detach() for r in results])
        found.append([*results, *gradients])
    for other in found[1:]:
        for one, another in zip(found[0], other, strict=True):
            assert torch.equal(one, another)
    assert_alone(made, made.run())


@pytest.mark.parametrize("feature", ["plain", "causal", "alibi", "dropout", "tree", "tree_heads", "tree_bias"])
def test_empty_sequences_give_zeros(feature: str) -> None:
    """Sequences without rows, without keys, without both. Rows without keys give 0 and lse -inf."""
    made = call(Packed("varlen empty", (0, 5, 7, 0, 9), (4, 0, 8, 0, 11), FEATURES[feature]))
    results = made.run()
    gradients = made.gradients(results)
    assert_alone(made, results, gradients)
    output, lse = made.results(results)[1]
    assert not output.any()
    assert torch.isneginf(lse).all()
    assert not gradients[1]["query"].any()
    assert not gradients[0]["key"].any()


@pytest.mark.parametrize("lengths", [((), ()), ((0, 0), (0, 0)), ((0, 0), (3, 4)), ((3, 4), (0, 0))])
def test_batches_of_only_empty_sequences(lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    rows, keys = lengths
    query, key, value = (torch.randn(sum(n), 2, 8, requires_grad=True) for n in (rows, keys, keys))
    bounds = max(rows, default=0), max(keys, default=0)
    output, lse = scaledot.varlen_attention(
        query, key, value, cumulative(rows), cumulative(keys), *bounds, return_lse=True
    )
    assert output.shape == (sum(rows), 2, 8)
    assert lse.shape == (2, sum(rows))
    assert not output.any()
    assert torch.isneginf(lse).all()
    for gradient in torch.autograd.grad(output.sum(), (query, key, value)):
        assert not gradient.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_after_seqused_k_are_ignored(dtype: str) -> None:
    """Keys after seqused_k are not read and have gradient 0."""
    made = call(Packed("varlen used", common=dict(causal=True, dtype=dtype)))
    room = (60, 128, 70, 40)
    spans = list(zip(cumulative(room).tolist(), made.packed.key_lengths, strict=False))

    def spread(rows: Tensor) -> Tensor:
        result = torch.full((sum(room), *rows.shape[1:]), torch.nan, dtype=rows.dtype)
        for (start, used), one in zip(spans, rows.split(made.packed.key_lengths), strict=True):
            result[start : start + used] = one
        return result.requires_grad_()

    query, key, value = made.query, spread(made.key.detach()), spread(made.value.detach())
    used = torch.tensor(made.packed.key_lengths)
    results = made.run(key=key, value=value, cu_seq_k=cumulative(room), seqused_k=used)
    assert_alone(made, results)
    wanted = made.gradients(made.run())
    made.key, made.value = key, value
    found = torch.autograd.grad(results, (query, key, value), torch.autograd.grad(sum_of(results), results))
    again = made.run(key=key, value=value, cu_seq_k=cumulative(room), seqused_k=used.int())
    assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))
    assert found[0].isfinite().all()
    for gradient in found[1:]:
        assert gradient.isfinite().all()
        for (start, length), end in zip(spans, cumulative(room).tolist()[1:], strict=True):
            assert not gradient[start + length : end].any()
    assert wanted[0]["key"].any()


def sum_of(results: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([r.double().sum() for r in results]).sum()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_strided_inputs_have_the_bits_of_contiguous_ones(dtype: str) -> None:
    """Views of one fused projection, and tensors whose columns are not contiguous."""
    fused = torch.randn(30, 3, 4, 16).to(DTYPES[dtype])
    inner = fused.transpose(-1, -2).contiguous().transpose(-1, -2)
    cu_seq = cumulative((11, 0, 19))
    wanted = scaledot.varlen_attention(*fused.clone().unbind(1), cu_seq, cu_seq, 19, 19, window_size=(-1, 0))
    for tensor in (fused, inner):
        found = scaledot.varlen_attention(*tensor.unbind(1), cu_seq, cu_seq, 19, 19, window_size=(-1, 0))
        assert torch.equal(found, wanted)
        leaf = tensor.detach().requires_grad_()
        scaledot.varlen_attention(*leaf.unbind(1), cu_seq, cu_seq, 19, 19).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()


def test_loose_bounds_integer_widths_and_num_splits_change_nothing() -> None:
    made = call(Packed("varlen bounds"), requires_grad=False)
    wanted = made.run()
    for changes in (
        dict(max_q=10**6, max_k=10**12),
        dict(cu_seq_q=cumulative(made.packed.query_lengths, torch.int64)),
        dict(cu_seq_q=cumulative(made.packed.query_lengths).repeat_interleave(2)[::2]),
        dict(num_splits=1),
        dict(num_splits=4),
    ):
        for found, want in zip(made.run(**changes), wanted, strict=True):
            assert torch.equal(found, want)


def test_memory_is_linear_in_the_number_of_sequences() -> None:
    """A mask of (total, total) would be 40 GB here."""
    lengths = (2,) * 100_000
    query = torch.randn(200_000, 1, 4)
    output = scaledot.varlen_attention(query, query, query, cumulative(lengths), cumulative(lengths), 2, 2)
    wanted = scaledot.scaled_dot_product_attention(*[query[-2:].transpose(0, 1)] * 3)
    assert torch.equal(output[-2:].transpose(0, 1), wanted)


def test_signature_contains_that_of_torch() -> None:
    """Every argument of torch's function is accepted, with the same name and default."""
    ours = inspect.signature(scaledot.varlen_attention).parameters
    theirs = inspect.signature(torch_varlen.varlen_attn).parameters
    positional = [n for n, p in theirs.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert list(ours)[: len(positional)] == positional
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name


def test_return_aux_and_window_size_mean_what_they_mean_in_torch() -> None:
    made = call(Packed("varlen torch names", common=dict(causal=True)), requires_grad=False)
    arguments = (
        made.query,
        made.key,
        made.value,
        cumulative(made.packed.query_lengths),
        cumulative(made.packed.key_lengths),
        70,
        90,
    )
    wanted, lse = made.run()
    aux = torch_varlen.AuxRequest
    attend: Any = scaledot.varlen_attention
    assert torch.equal(attend(*arguments, window_size=(-1, 0)), wanted)
    assert torch.equal(attend(*arguments, True), wanted)
    assert torch.equal(attend(*arguments, is_causal=True, return_aux=aux()), wanted)
    for found in (attend(*arguments, True, return_aux=aux(lse=True)), attend(*arguments, True, return_lse=True)):
        assert torch.equal(found[0], wanted)
        assert torch.equal(found[1], lse)
    assert torch.equal(attend(*arguments, window_size=(9, -1)), attend(*arguments, window=(9, None)))
    assert not torch.equal(attend(*arguments, window_size=(9, -1)), attend(*arguments))


def test_dropout_seeds_come_from_the_generator_of_torch() -> None:
    made = call(Packed("varlen generator"), requires_grad=False)
    cu_seq_q, cu_seq_k = cumulative(made.packed.query_lengths), cumulative(made.packed.key_lengths)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        result: Tensor = scaledot.varlen_attention(
            made.query, made.key, made.value, cu_seq_q, cu_seq_k, 70, 90, dropout_p=0.4
        )
        return result

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_one_set_of_alibi_slopes_for_all_sequences() -> None:
    made = call(Packed("varlen slopes"), requires_grad=False)
    slopes = torch.tensor([0.3, 0.1])
    results = made.run(alibi_slopes=slopes)
    for b, (output, lse) in enumerate(made.results(results)):
        one = Case("slopes", batch=(), causal_alignment="lower_right")
        i = made.inputs[b]
        wanted = sdpa(one, Inputs(i.query, i.key, i.value, alibi_slopes=slopes))
        assert torch.equal(output, wanted[0])
        assert torch.equal(lse, wanted[1])


def test_nan_in_a_sequence_does_not_reach_others() -> None:
    made = call(Packed("varlen poison"), requires_grad=False)
    wanted = made.results(made.run())
    poisoned = made.query.clone()
    poisoned[: made.packed.query_lengths[0]] = torch.nan
    found = made.results(made.run(query=poisoned))
    assert found[0][0].isnan().all()
    for b in (1, 2, 3):
        assert torch.equal(found[b][0], wanted[b][0])


def test_a_forced_kernel_runs_every_sequence() -> None:
    made = call(Packed("varlen forced"), requires_grad=False)
    plain = made.run()
    with forced("default"):
        slow = made.run()
    assert scaledot.cpu_capability() == "default" or not torch.equal(plain[0], slow[0])
    assert torch.allclose(plain[0], slow[0], atol=1e-5)
