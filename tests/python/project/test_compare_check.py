"""scaledot.compare: the correctness check and the work of a case."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import scaledot
from command_line import only_case
from scaledot.compare import check as rule
from scaledot.compare import run, work
from scaledot.compare.cache_work import CacheWork
from scaledot.compare.features import FEATURES
from scaledot.compare.sample import Sample
from scaledot.compare.timing import Effort
from scaledot.compare.work import leaves_of
from scaledot.dropin import torch_nn

CPU = torch.device("cpu")


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("sampled", [False, True])
def test_every_feature_passes_the_check(feature: str, sampled: bool) -> None:
    case = only_case(feature, "3x4x40x16")
    one = run.make_work(case, CPU, "sdpa")
    if sampled:
        shape = one.sample.shape
        one.sample = Sample.of(shape, budget=2 * shape.heads // shape.kv_heads * 13 * shape.key_length)
        assert 0 < one.sample.share < 0.6
    verdict = rule.check(one)
    assert verdict.problems() == []
    assert set(verdict.findings) >= {"output", *one.inputs}
    for finding in verdict.findings.values():
        assert math.isfinite(finding.peer)
        assert finding.peer < 0.2 * finding.scale, "the peer computes something else"


@pytest.mark.parametrize("feature", ["plain", "gqa", "mask_grad", "mha_weights"])
@pytest.mark.parametrize("wrong", ["query", "key", "value"])
def test_check_finds_a_wrong_gradient(feature: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(right: Callable[..., Any]) -> Callable[..., Any]:
        def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> Any:
            tensors = {"query": query, "key": key, "value": value}
            kept = tensors[wrong]
            tensors[wrong] = 1.1 * kept - 0.1 * kept.detach()  # equal values, but 1.1 times the gradient
            return right(*tensors.values(), *rest, **options)

        return attention

    for owner, name in (
        (scaledot, "scaled_dot_product_attention"),
        (torch_nn, "attention_with_average_weights"),
    ):
        monkeypatch.setattr(owner, name, spoiled(getattr(owner, name)))
    one = run.make_work(only_case(feature, dtype="float32"), CPU, "sdpa")
    one.sample = Sample.of(one.sample.shape, budget=1000)
    found = rule.check(one)
    assert not found.passed
    name = {"mha_weights": "in_proj_weight"}.get(feature, wrong)
    assert any(problem.startswith(f"{name}: error") for problem in found.problems())


def test_check_finds_non_finite_elements() -> None:
    oracle = torch.randn(3, 4, dtype=torch.float64)
    ours = oracle.float()
    ours[0, 1] = math.nan
    found = rule.judge(ours, None, oracle.float(), oracle, torch.float32, gradient=False)
    assert found.problem is not None
    assert "1 of 12 elements" in found.problem


@pytest.mark.parametrize(
    ("feature", "label"),
    [
        ("plain", "F.sdpa flash"),
        ("gqa", "F.sdpa flash"),
        ("dropout", "F.sdpa math"),
        ("mask_grad", "F.sdpa math"),
        ("value_dim", "F.sdpa math"),
        ("window", "F.sdpa flash + mask"),
        ("alibi", "F.sdpa flash + mask"),
        ("weights", "eager"),
        ("softcap", "eager"),
        ("mha_weights", "nn.MultiheadAttention"),
        ("cache_int8", "dequantising + F.sdpa"),
    ],
)
def test_peer_labels(feature: str, label: str) -> None:
    assert run.make_work(only_case(feature), CPU, "sdpa").peer_label == label


def test_inputs_are_the_same_for_every_dtype_and_run() -> None:
    first, again = (work.AttentionWork(only_case("plain"), CPU).inputs["query"] for _ in range(2))
    assert torch.equal(first, again)
    wide = work.AttentionWork(only_case("plain", dtype="float32"), CPU).inputs["query"]
    assert torch.equal(first, wide.bfloat16())


@pytest.mark.parametrize("feature", ["cache_int8", "cache_e5m2", "cache_e4m3"])
def test_a_quantised_cache_is_read_in_place_and_only_forward(feature: str) -> None:
    case = only_case(feature, "2x4:2x1:300x16")
    row = run.run_case(case, CPU, ("forward", "backward"), Effort(1e-4, 1), "sdpa", lambda part: None)
    assert row.verdict.passed
    assert set(row.passes) == {"forward"}
    assert row.kernels == {"forward": row.kernels["forward"]}
    made = CacheWork(case, CPU)
    assert {tensor.dtype for tensor in made.stored.values()} == {case.feature.cache}


def test_check_finds_a_wrong_scale_of_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    right = scaledot.varlen_attention

    def wrong(*, v_scale: torch.Tensor, **arguments: Any) -> Any:
        return right(v_scale=v_scale * 1.1, **arguments)

    monkeypatch.setattr(scaledot, "varlen_attention", wrong)
    found = rule.check(run.make_work(only_case("cache_int8"), CPU, "sdpa"))
    assert any(problem.startswith("output: error") for problem in found.problems())


@pytest.mark.parametrize("compiler", [None, "/usr/bin/g++"])
def test_the_peer_of_a_score_function(compiler: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention, and with gradients the formula."""
    monkeypatch.setattr("shutil.which", lambda name: compiler)
    one = run.make_work(only_case("score_mod", dtype="float32"), CPU, "sdpa")
    assert one.peer_label == f"flex {'compiled' if compiler else 'eager'}, formula"
    monkeypatch.setattr("torch.compile", lambda function, **_: function)  # compiling takes long
    leaves = leaves_of(one.inputs, False)
    flex, formula = one.peer(leaves), one.peer(leaves_of(one.inputs, True))
    assert flex.func is not formula.func
    torch.testing.assert_close(flex(), formula().detach())
