"""Which kernel runs: the order of the table, what each kernel must take, SCALEDOT_CPU_CAPABILITY, explain."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import scaledot
from case_list import BY_NAME, CASES
from cases import DTYPES, Case
from kernels_under_test import BFLOAT16_ONLY, BOTH, FEW_ROWS, GENERAL, KERNELS, explain, takes

LEVELS = scaledot._load.OPS.cpu_capabilities()
AMX_ROWS = 8  # amx_bf16 leaves calls with fewer rows that share keys to avx512_bf16
KINDS = ("_decode", "_key_lists")  # of kernels that are not named after their capability alone
CHOSEN = explain(CASES[0], CASES[0].make())["forward"]["kernel"]


def level_of(kernel: str) -> int:
    """The index in LEVELS of the capability that a kernel needs."""
    return LEVELS.index(re.sub(f"({'|'.join(KINDS)})$", "", kernel))


def test_the_table_has_the_fastest_kernels_first() -> None:
    """Kernels that need a higher capability come first."""
    kinds = {kind: [k for k in KERNELS if k.endswith(kind)] for kind in KINDS}
    kinds[""] = [k for k in KERNELS if not k.endswith(KINDS)]
    for kernels in kinds.values():
        levels = [level_of(kernel) for kernel in kernels]
        assert levels == sorted(levels, reverse=True)
    pairs = {level for level in LEVELS if level.endswith("_bf16")}
    if "amx_bf16" not in KERNELS:  # a compiler that does not know AMX
        pairs -= {"amx_bf16"}
    by_level = {f"{level}{kind}" for level in LEVELS if level not in pairs for kind in ("", *KINDS)}
    tiles = {f"{level}{kind}" for level in pairs if level.startswith("amx") for kind in KINDS}
    assert set(KERNELS) == by_level | pairs | tiles


def test_the_levels_of_this_architecture() -> None:
    wanted = {"x86_64": ["avx2", "avx512", "avx512_bf16", "amx_bf16"], "aarch64": ["neon", "neon_bf16"]}
    assert LEVELS[1:] == wanted.get(os.uname().machine, [])


def test_an_unknown_kernel_cannot_be_forced() -> None:
    with pytest.raises(ValueError, match="no_such_kernel"):
        scaledot._load.force_kernel("no_such_kernel")
    case = CASES[0]
    assert explain(case, case.make())["forward"]["kernel"] == CHOSEN


def rows_that_share_keys(case: Case) -> int:
    return case.query_length * ((case.heads or 1) // (case.kv_heads or case.heads or 1))


def refused_reason(kernel: str) -> str:
    plan = explain(CASES[0], CASES[0].make())
    return str(dict(plan["forward"]["refused"])[kernel])


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_takes_the_cases_it_must_take(kernel: str) -> None:
    """Other tests run a case on the kernels that take it. This test says which cases a kernel must take."""
    if level_of(kernel) > LEVELS.index(scaledot.cpu_capability()):
        assert LEVELS[level_of(kernel)] in refused_reason(kernel)
    elif kernel.endswith("_decode"):
        tiles = kernel.startswith("amx")
        assert tiles or kernel in FEW_ROWS
        for case in CASES:
            plain = case.layout == "misaligned" and case.key_layout is None and not case.return_weights
            rows = rows_that_share_keys(case)
            many_keys = case.dtype == "bfloat16" and case.key_length >= max(128, 16 * rows)
            if plain and rows <= 8 and not tiles:
                assert takes(kernel, case, BOTH), case.name
            elif plain and tiles and 2 <= rows <= 32 and many_keys:
                assert takes(kernel, case, ("forward",)), case.name
                assert not takes(kernel, case, ("backward",)), case.name
    elif kernel.endswith("_key_lists"):  # tests/python/numerics/test_key_indices.py runs them
        for case in CASES:
            assert not any(takes(kernel, case, (one_pass,)) for one_pass in BOTH), case.name
    else:
        assert kernel in GENERAL + BFLOAT16_ONLY
        for case in CASES:
            few = kernel == "amx_bf16" and rows_that_share_keys(case) < AMX_ROWS
            if kernel in GENERAL or (case.dtype == "bfloat16" and not few):
                assert takes(kernel, case, BOTH), case.name


@pytest.mark.parametrize(
    ("rows", "head_dim", "dtype", "forward", "backward"),
    [
        (8, 32, "float32", True, True),
        (9, 32, "float32", False, True),
        (16, 64, "float16", True, True),
        (17, 64, "float32", False, True),
        (17, 128, "float16", False, True),
        (32, 128, "float32", True, True),
        (33, 128, "float32", False, False),
    ],
)
def test_how_many_rows_are_few(rows: int, head_dim: int, dtype: str, forward: bool, backward: bool) -> None:
    """The kernels for few rows take more where keys are long, and in the backward."""
    case = Case("few rows", query_length=rows, key_length=600, head_dim=head_dim, dtype=dtype)
    for one_pass, wanted in (("forward", forward), ("backward", backward)):
        for kernel in FEW_ROWS:
            assert takes(kernel, case, (one_pass,)) == wanted


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
    """Nothing of size Lq x Lk is allocated."""
    for options in ({}, {"causal": True, "dropout_p": 0.1}, {"mask": "float", "mask_shape": "K"}):
        case = Case("long", batch=(1,), heads=4, head_dim=8, **options)
        plan = {}
        for length in (2048, 8192):
            long = case.with_(query_length=length, key_length=length)
            plan[length] = explain(long, long.make())
        for one_pass in ("forward", "backward"):
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
from kernels_under_test import explain, sdpa
report = {"capability": scaledot.cpu_capability(), "kernels": {}}
report["warnings"] = [str(w.message) for w in caught]
for name in sys.argv[2:]:
    case = BY_NAME[name]
    inputs, solution = case.make().requiring_grad(), solve(case)
    plan = explain(case, inputs)
    results = sdpa(case, inputs)
    solution.check_results(results, case.return_weights)
    for key, gradient in eager.gradients(results, case.cotangents(), inputs.differentiable()).items():
        solution.check(key, gradient)
    report["kernels"][name] = plan
print(json.dumps(report))
"""
SMOKE_CASES = [f"everything-{dtype}" for dtype in DTYPES]
SMOKE_CASES += ["causal-float32", "decode_gqa-bfloat16", "decode-bias-float16"]


def levels_for(name: str, one_pass: str) -> list[int]:
    """The levels that have a kernel for this case, as indices in LEVELS."""
    few = rows_that_share_keys(BY_NAME[name]) < AMX_ROWS
    decoding = name.startswith("decode") and (one_pass == "forward" or few)

    def has_kernel(level: str) -> bool:
        if not level.endswith("_bf16"):
            return True
        if level not in KERNELS or not name.endswith("bfloat16"):
            return False
        if decoding:
            return one_pass == "forward" and f"{level}_decode" in KERNELS
        return not (few and level == "amx_bf16")

    return [index for index, level in enumerate(LEVELS) if has_kernel(level)]


def smoke(level: str | None) -> dict:  # type: ignore[type-arg]
    environment = {k: v for k, v in os.environ.items() if k != "SCALEDOT_CPU_CAPABILITY"}
    if level is not None:
        environment["SCALEDOT_CPU_CAPABILITY"] = level
    tests = str(Path(__file__).resolve().parents[2] / "library")
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
    """The capability of this machine when the environment does not lower it."""
    capability: str = smoke(None)["capability"]
    return capability


@pytest.mark.parametrize("level", LEVELS)
def test_the_environment_lowers_the_capability(level: str, machine: str) -> None:
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
                assert reason, f"{name}: {kernel} refused without a reason"
                if level_of(kernel) > LEVELS.index(level):
                    assert LEVELS[level_of(kernel)] in reason
            best = max(index for index in levels_for(name, one_pass) if index <= LEVELS.index(level))
            assert level_of(plan[one_pass]["kernel"]) == best


def test_an_unknown_level_is_a_warning(machine: str) -> None:
    report = smoke("sse9")
    assert report["capability"] == machine
    assert any("sse9" in w for w in report["warnings"])


def test_public_explain_prints_what_the_op_reports() -> None:
    case = Case("public", causal=True)
    inputs = case.make()
    explanation = scaledot.explain(inputs.query, inputs.key, inputs.value, is_causal=True)
    text = str(explanation)
    assert explain(case, inputs)["forward"]["kernel"] in text
    for name, reason in explain(case, inputs)["forward"]["refused"]:
        assert name in text
        assert reason in text
