"""Which kernel runs: the table's order, what every kernel has to take, SCALEDOT_CPU_CAPABILITY, explain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import scaledot
import torch
from case_list import CASES
from cases import Case
from ours import KERNELS, explain, forced

LEVELS = ("default", "avx2", "avx512", "avx512_bf16")
CHOSEN = explain(CASES[0], CASES[0].make())["forward"]["kernel"]
NEEDS = {"default": "default", "avx2": "avx2", "avx512": "avx512", "reference": "default"}


def test_the_table() -> None:
    assert KERNELS[-1] == "reference"
    assert "default" in KERNELS
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT" and os.uname().machine == "x86_64":
        assert KERNELS == ("avx512", "avx2", "default", "reference")


def test_an_unknown_kernel_cannot_be_forced() -> None:
    with pytest.raises(ValueError, match="no_such_kernel"):
        scaledot._C.force_kernel("no_such_kernel")
    case = CASES[0]
    assert explain(case, case.make())["forward"]["kernel"] == CHOSEN


@pytest.mark.parametrize("kernel_name", KERNELS)
def test_every_kernel_takes_every_case_it_is_made_for(kernel_name: str) -> None:
    """The case tests skip what a kernel refuses; here is what it may refuse, so that none slips out of
    testing."""
    if LEVELS.index(NEEDS[kernel_name]) > LEVELS.index(scaledot.cpu_capability()):
        reason = dict(explain(CASES[0], CASES[0].make())["forward"]["refused"])[kernel_name]
        assert NEEDS[kernel_name].upper().replace("AVX512", "AVX-512") in reason.upper()
        return
    refused: Counter[tuple[str, str, str]] = Counter()
    with forced(kernel_name):
        for case in CASES:
            plan = explain(case, case.make())
            for one_pass in ("forward", "backward"):
                if plan[one_pass]["kernel"] != kernel_name:
                    refused[one_pass, case.dtype, dict(plan[one_pass]["refused"])[kernel_name]] += 1
    assert not refused, "\n".join(f"{key}: {count} cases" for key, count in refused.items())


def test_the_first_kernel_that_takes_a_problem_runs() -> None:
    for case in CASES[::7]:
        plan = explain(case, case.make())
        for one_pass in ("forward", "backward"):
            refused = [name for name, reason in plan[one_pass]["refused"]]
            assert (*refused, plan[one_pass]["kernel"]) == KERNELS[: len(refused) + 1]
            assert all(reason for _, reason in plan[one_pass]["refused"])
            assert plan[one_pass]["workspace_bytes"] >= 0
        assert plan["device"] == "cpu"
        assert plan["capability"] == scaledot.cpu_capability()


def test_workspace_is_linear_in_length() -> None:
    """No kernel but the reference keeps anything of size Lq x Lk."""
    for options in ({}, {"causal": True, "dropout_p": 0.1}, {"mask": "float", "mask_shape": "K"}):
        case = Case("long", batch=(1,), heads=4, head_dim=8, **options)
        plan = {}
        for length in (2048, 8192):
            long = case.with_(query_length=length, key_length=length)
            plan[length] = explain(long, long.make())
        for one_pass in ("forward", "backward"):
            assert plan[8192][one_pass]["kernel"] != "reference"
            small, large = (plan[n][one_pass]["workspace_bytes"] for n in (2048, 8192))
            assert large <= 4 * small + 2**16


SMOKE = """
import json, sys, warnings
sys.path.insert(0, sys.argv[1])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import scaledot
import torch, eager
from case_list import BY_NAME
from oracle import solve
from ours import explain, sdpa
from tolerances import check
report = {"capability": scaledot.cpu_capability(), "kernels": {}}
report["warnings"] = [str(w.message) for w in caught]
for name in sys.argv[2:]:
    case = BY_NAME[name]
    inputs, solution = case.make().requiring_grad(), solve(case)
    plan = explain(case, inputs)
    results = sdpa(case, inputs)
    check("output", results[0], solution.results["output"], solution.eager_error["output"])
    check("lse", results[1], solution.results["lse"], solution.eager_error["lse"])
    for key, gradient in eager.gradients(results, case.cotangents(), inputs.differentiable()).items():
        terms = solution.terms[key]
        check(key, gradient, solution.gradients[key], solution.eager_error[key], gradient=True, terms=terms)
    report["kernels"][name] = plan
print(json.dumps(report))
"""
SMOKE_CASES = [
    f"{name}-{dtype}"
    for name in ("everything", "causal", "decode_gqa", "bias")
    for dtype in ("float32", "bfloat16", "float16", "float64")
]


def smoke(level: str | None) -> dict:  # type: ignore[type-arg]
    environment = {k: v for k, v in os.environ.items() if k != "SCALEDOT_CPU_CAPABILITY"}
    if level is not None:
        environment["SCALEDOT_CPU_CAPABILITY"] = level
    tests = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", SMOKE, tests, *SMOKE_CASES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict = json.loads(done.stdout.splitlines()[-1])  # type: ignore[type-arg]
    return result


@pytest.fixture(scope="module")
def machine() -> str:
    """What this machine offers when nothing lowers it."""
    capability: str = smoke(None)["capability"]
    return capability


@pytest.mark.parametrize("level", LEVELS)
def test_capability_is_lowered_by_the_environment(level: str, machine: str) -> None:
    report = smoke(level)
    if LEVELS.index(level) > LEVELS.index(machine):
        assert report["capability"] == machine
        assert any(level in w and machine in w for w in report["warnings"])
        return
    assert report["capability"] == level
    assert not report["warnings"]
    for name, plan in report["kernels"].items():
        assert plan["capability"] == level
        for one_pass in ("forward", "backward"):
            for kernel, reason in plan[one_pass]["refused"]:
                if LEVELS.index(NEEDS[kernel]) > LEVELS.index(level):
                    assert reason, f"{name}: {kernel} refused without a reason"
            assert LEVELS.index(NEEDS[plan[one_pass]["kernel"]]) <= LEVELS.index(level)
        if level in KERNELS:
            assert plan["forward"]["kernel"] == plan["backward"]["kernel"] == level


def test_an_unknown_level_is_a_warning(machine: str) -> None:
    report = smoke("sse9")
    assert report["capability"] == machine
    assert any("sse9" in w for w in report["warnings"])


def test_public_explain_says_the_same_and_prints() -> None:
    case = Case("public", causal=True)
    inputs = case.make()
    told = scaledot.explain(inputs.query, inputs.key, inputs.value, is_causal=True)
    text = str(told)
    assert explain(case, inputs)["forward"]["kernel"] in text
    for name, reason in explain(case, inputs)["forward"]["refused"]:
        assert name in text
        assert reason in text
