"""Packed sequences with explain and with torch's FLOP counters, profilers, overrides and hooks."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import scaledot
from kernels_under_test import KERNELS
from recording_tensor import RecordingTensor
from varlen_cases import FEATURES, Call, Packed, call, cumulative

attend: Any = scaledot.varlen_attention
explain: Any = scaledot.explain_varlen


def arguments(made: Call) -> tuple[Any, ...]:
    p = made.packed
    bounds = max(p.query_lengths, default=0), max(p.key_lengths, default=0)
    return (made.query, made.key, made.value, cumulative(p.query_lengths), cumulative(p.key_lengths), *bounds)


# ------------------------------------------------------------------------------------------------ explain


def test_explain_takes_the_arguments_of_the_call() -> None:
    of_explain, of_call = (inspect.signature(f) for f in (explain, attend))
    assert of_explain.parameters == of_call.parameters


@pytest.mark.parametrize("feature", FEATURES)
def test_explain_counts_the_kernels_chosen_for_each_sequence(feature: str) -> None:
    """The counts are those of explain for each sequence alone."""
    options = {"softcap": 2.0} if feature == "softcap_scale" else {}
    common = FEATURES[feature]
    made = call(Packed(f"explain {feature}", (37, 5, 0, 70, 1, 1), (53, 90, 9, 70, 900, 0), common))
    call_options = dict(
        is_causal=common.get("causal", False),
        causal_alignment=common.get("causal_alignment", "lower_right"),
        window=common.get("window"),
        enable_gqa=common.get("enable_gqa", False),
        dropout_p=common.get("dropout_p", 0.0),
        **options,
    )
    plan = explain(*arguments(made), **call_options, alibi_slopes=made.alibi_slopes, attn_mask=made.attn_mask)
    wanted: dict[str, dict[Any, int]] = {"forward": {}, "backward": {}}
    for inputs in made.inputs:
        if not inputs.query.numel() or not inputs.key.numel():
            continue
        alone = scaledot.explain(
            inputs.query,
            inputs.key,
            inputs.value,
            inputs.attn_mask,
            alibi_slopes=inputs.alibi_slopes,
            **call_options,
        )
        for name, counts in wanted.items():
            choice = getattr(alone, name)
            key = (choice.kernel, choice.refused)
            counts[key] = counts.get(key, 0) + 1
    for name, counts in wanted.items():
        assert {(c.kernel, c.refused): c.sequences for c in getattr(plan, name).kernels} == counts
        assert sum(counts.values()) == 4


def test_explain_prints_every_kernel_and_refusal() -> None:
    made = call(Packed("explain prints", (300, 1, 1), (300, 2000, 900)))
    plan = explain(*arguments(made))
    text = str(plan)
    assert text.startswith(f"scaledot on cpu ({scaledot.cpu_capability()}), packed sequences\n  forward")
    for one in (plan.forward, plan.backward):
        assert sum(choice.sequences for choice in one.kernels) == 3
        for choice in one.kernels:
            assert choice.kernel in KERNELS
            assert f"{choice.kernel} for {choice.sequences} of them" in text
            for refusal in choice.refused:
                # Kernels with the same reason share a line.
                assert re.search(rf"not (\w+, )*{refusal.kernel}(, \w+)*: {re.escape(refusal.reason)}\n", text + "\n")
    assert len(plan.forward.kernels) == 2  # few rows over many keys, and the other


def test_explain_of_one_sequence_has_its_workspace() -> None:
    made = call(Packed("explain one", (200,), (300,)))
    plan, inputs = explain(*arguments(made)), made.inputs[0]
    alone = scaledot.explain(inputs.query, inputs.key, inputs.value)
    assert plan.forward.workspace_bytes == alone.forward.workspace_bytes
    assert plan.backward.workspace_bytes == alone.backward.workspace_bytes
    assert plan.forward.workspace_bytes > 0


def test_explain_counts_one_workspace_per_thread() -> None:
    """Each thread works on one of many sequences at a time."""
    torch.set_num_threads(1)
    one = explain(*arguments(call(Packed("explain threads", (60,), (70,)))))
    plans = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        plans.append(explain(*arguments(call(Packed("explain threads", (60,) * 20, (70,) * 20)))))
    for name in ("forward", "backward"):
        alone = getattr(one, name).workspace_bytes
        assert [getattr(plan, name).workspace_bytes for plan in plans] == [alone, 2 * alone, 3 * alone]


def test_explain_of_pages_has_no_backward() -> None:
    pool, table = torch.randn(4, 16, 2, 8), torch.tensor([[0, 2], [3, -1]])
    rest = (cumulative((1, 1)), None, 1, 32)
    plan = explain(torch.randn(2, 2, 8), pool, pool, *rest, seqused_k=torch.tensor([20, 9]), block_table=table)
    assert plan.backward is None
    assert "backward  none: keys and values in pages have no gradient" in str(plan)
    assert sum(choice.sequences for choice in plan.forward.kernels) == 2


def test_explain_of_empty_sequences_has_no_kernel() -> None:
    for lengths in (((), ()), ((0, 0), (3, 4)), ((3, 4), (0, 0))):
        query, key = (torch.randn(sum(n), 2, 8, requires_grad=True) for n in lengths)
        plan = explain(query, key, key, cumulative(lengths[0]), cumulative(lengths[1]), 4, 4)
        assert plan.forward.kernels == plan.backward.kernels == ()
        assert plan.forward.workspace_bytes == 0


@pytest.mark.parametrize("fake", [False, True])
def test_explain_of_meta_and_fake_tensors_uses_the_bounds(fake: bool) -> None:
    """Every sequence counts as max_q and max_k long. No memory is allocated."""
    with FakeTensorMode() if fake else torch.device("meta"):
        query = torch.empty(10**9, 128, 128, dtype=torch.bfloat16)
        cu_seq = torch.empty(10**4 + 1, dtype=torch.int32)
        plan = explain(query, query, query, cu_seq, cu_seq, 10**5, 10**5, is_causal=True)
        pool, table = torch.empty(10**6, 16, 128, 128, dtype=torch.bfloat16), torch.empty(10**4, 64, dtype=torch.int32)
        used = torch.empty(10**4, dtype=torch.int32)
        paged = explain(query, pool, pool, cu_seq, None, 1, 1024, seqused_k=used, block_table=table)
    assert [choice.sequences for choice in plan.forward.kernels] == [10**4]
    assert [choice.sequences for choice in plan.backward.kernels] == [10**4]
    assert [choice.sequences for choice in paged.forward.kernels] == [10**4]
    assert plan.device == "cpu"


def test_explain_draws_no_seed_and_raises_the_errors_of_the_call() -> None:
    made = call(Packed("explain refuses"))
    state = torch.get_rng_state()
    explain(*arguments(made), dropout_p=0.3)
    assert torch.equal(torch.get_rng_state(), state)
    query, key, value, cu_q, cu_k, max_q, max_k = arguments(made)
    for bad in (
        dict(max_q=69),
        dict(cu_seq_q=cumulative((37, 5, 70, 2))),
        dict(key=key.double()),
        dict(window_size=(1, 2, 3)),
        dict(alibi_slopes=torch.ones(2, requires_grad=True)),
        dict(query=query.detach().to_sparse()),
    ):
        given = dict(query=query, key=key, value=value, cu_seq_q=cu_q, cu_seq_k=cu_k, max_q=max_q, max_k=max_k) | bad
        with pytest.raises((TypeError, ValueError)) as of_call:
            attend(**given)
        with pytest.raises(type(of_call.value)) as of_explain:
            explain(**given)
        assert str(of_explain.value) == str(of_call.value)


def test_explain_under_autocast_explains_the_cast_call() -> None:
    made = call(Packed("explain autocast"))
    with torch.autocast("cpu", torch.bfloat16):
        plan = explain(*arguments(made))
    cast = [t.detach().bfloat16() for t in (made.query, made.key, made.value)]
    assert plan == explain(*cast, *arguments(made)[3:])


# ---------------------------------------------------------------------------------------------- counters and profilers


@pytest.mark.parametrize("feature", ["plain", "gqa"])
def test_flops_are_those_of_torch_for_each_sequence(feature: str) -> None:
    made = call(Packed(f"flops {feature}", common=FEATURES[feature]))
    with FlopCounterMode(display=False) as counter:
        attend(*arguments(made), enable_gqa=True).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    # The formulas of torch 2.11 need a key head for every query head; those of 2.13 give the same count.
    shapes = [(i.query.shape, *((i.query.shape[0], *t.shape[1:]) for t in (i.key, i.value))) for i in made.inputs]
    forward = sum(sdpa_flop_count(*((1, *s) for s in one)) for one in shapes)
    outputs = [(1, *q[:-1], v[-1]) for q, _, v in shapes]
    backward = sum(sdpa_backward_flop_count(o, *((1, *s) for s in one)) for o, one in zip(outputs, shapes, strict=True))
    assert counts == {torch.ops.scaledot.varlen_recorded: forward, torch.ops.scaledot.varlen_backward: backward}


@pytest.mark.skipif(
    not hasattr(torch.utils.flop_counter, "_varlen_attn_forward_flop"),
    reason=f"torch {torch.__version__} does not count its packed attention",
)
def test_flops_of_torchs_own_packed_attention_are_the_same() -> None:
    """Calls the formula of torch for varlen_attn directly, because its kernel needs a GPU."""
    formula: Any = torch.utils.flop_counter._varlen_attn_forward_flop  # type: ignore[attr-defined]
    made = call(Packed("flops torch"))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        attend(*arguments(made))
    assert counter.get_total_flops() == formula(*arguments(made))


def test_flops_count_the_used_keys_of_pages() -> None:
    pool, table, used = torch.randn(4, 16, 2, 8), torch.tensor([[0, 2], [3, -1]]), torch.tensor([20, 9])
    with FlopCounterMode(display=False) as counter:
        attend(torch.randn(3, 2, 8), pool, pool, cumulative((1, 2)), None, 2, 32, seqused_k=used, block_table=table)
    assert counter.get_total_flops() == 2 * 2 * (1 * 20 + 2 * 9) * (8 + 8)


@pytest.mark.parametrize("fake", [False, True])
def test_flops_of_meta_and_fake_tensors_use_the_bounds(fake: bool) -> None:
    """Torch's count overestimates in the same way."""
    with FakeTensorMode() if fake else torch.device("meta"):
        query, cu_seq = torch.empty(9, 2, 8), torch.empty(4, dtype=torch.int32)
        with FlopCounterMode(display=False) as counter:
            attend(query, query, query, cu_seq, cu_seq, 5, 6)
    assert counter.get_total_flops() == 2 * 2 * (3 * 5 * 6) * (8 + 8)


@pytest.mark.filterwarnings("ignore")  # the profiler warns
def test_the_profiler_shows_the_ops_and_nodes() -> None:
    made = call(Packed("profiler"))
    with torch.profiler.profile() as profile:
        output = attend(*arguments(made))
        output.sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"scaledot::varlen", "scaledot::varlen_backward"} <= names
    assert any("ScaledotVarlenBackward" in name for name in names)
    assert output.grad_fn.name() == "ScaledotVarlenBackward"


# ------------------------------------------------------------------------------------------------ overrides and hooks


@pytest.mark.parametrize("which", range(7))
def test_any_argument_can_override_the_function(which: int) -> None:
    made = call(Packed("overrides"), requires_grad=False)
    tensors = [*arguments(made)[:5], torch.tensor([50, 9, 70, 33]), torch.rand(2)]

    def run(given: list[Tensor]) -> Any:
        return attend(*given[:5], 70, 90, window_size=(9, 0), seqused_k=given[5], alibi_slopes=given[6], softcap=3.0)

    wanted = run(tensors)
    tensors[which] = tensors[which].as_subclass(RecordingTensor)
    RecordingTensor.seen.clear()
    found = run(tensors)
    assert RecordingTensor.seen[0] is scaledot.varlen_attention
    assert torch.equal(found.as_subclass(Tensor), wanted)


def test_saved_tensor_hooks_see_the_saved_tensors() -> None:
    made = call(Packed("hooks"))
    inputs = (made.query, made.key, made.value)
    wanted = torch.autograd.grad(attend(*arguments(made)).square().sum(), inputs)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = attend(*arguments(made))
    assert len(packed) == 7  # query, key, value, cu_seq_q, cu_seq_k, output, lse
    for mine, right in zip(torch.autograd.grad(output.square().sum(), inputs), wanted, strict=True):
        assert torch.equal(mine, right)


def test_writing_a_saved_tensor_is_an_error() -> None:
    made = call(Packed("written"))
    key = made.key.detach().clone()
    output = attend(made.query, key, *arguments(made)[2:])
    key.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_second_backward_is_an_error() -> None:
    made = call(Packed("twice"))
    output = attend(*arguments(made))
    output.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        output.sum().backward()
