"""The smoke test of tests/gpu without a GPU: on the CPU, and with kernels that are wrong, fault and hang on purpose."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu import families, lines, pattern, probes, smoke
from gpu.families import Family
from gpu.jobs import Crew, Facts, Tell
from gpu.report import source_package

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = os.pathsep.join(map(str, (*source_package(), ROOT / "tests", ROOT / "tests" / "library")))

# Replaces the calls of the smoke test. A probe's kind says what is wrong with it. Problems are small.
STAND_IN = """
import os, signal, sys, time
import torch
from gpu import probe_calls, smoke
from gpu.probes import Probe, dense

ours, bfloat16 = probe_calls.dense_attention, torch.bfloat16


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
        time.sleep(600)


def attention(query, *arguments, **options):
    rows = query.shape[-2]
    if rows == 20:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if rows == 21:
        os.kill(os.getpid(), signal.SIGSEGV)
    output, lse = ours(query, *arguments, **options)
    if rows == 22:
        return Backward.apply(output), lse
    if rows == 23:
        time.sleep(600)
    changed = torch.zeros_like(output, dtype=torch.bool)
    if rows == 100:  # one panel of one warp
        changed[1, 2, 80:96, 64:] = True
    if rows == 101:  # the last row is not written
        changed[..., -1, :] = True
    return torch.where(changed, 5.0 if rows == 100 else torch.nan, output), lse


probe_calls.dense_attention = attention
sizes = {"hangs": 23, "error": 20, "right": 16, "crash": 21, "late": 22, "wrong": 100, "unwritten": 101}
smoke.probes = lambda: [dense(kind, bfloat16, (128, 128), (rows, 24)) for kind, rows in sizes.items()]
raise SystemExit(smoke.main(["--device", "cpu", *sys.argv[1:]]))
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": FOLDERS}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)


def test_a_stand_in_that_is_wrong_faults_and_hangs(tmp_path: Path) -> None:
    """Each probe gets its verdict. None takes another with it, nor the time of another."""
    results, begin = tmp_path / "results.jsonl", time.monotonic()
    done = run("-c", STAND_IN, "--results", str(results), "--seconds", "8", "--parallel", "4")
    assert done.returncode == 1, done.stderr
    assert time.monotonic() - begin < 60
    found = {line["probe"].split()[0]: line for line in lines.read(results, "smoke")}
    verdicts = {name: line["result"] for name, line in found.items()}
    assert verdicts == {
        "right": "right", "wrong": "wrong", "unwritten": "wrong", "error": "error", "crash": "crash", "hangs": "hang",
        "late": "hang",
    }  # fmt: skip
    assert "illegal memory access" in found["error"]["error"]
    assert found["crash"]["ended"] == "signal 11 (SIGSEGV)"
    assert (found["hangs"]["stage"], found["late"]["stage"]) == ("forward", "backward")
    assert found["late"]["output"]["wrong"] == 0  # what came before is there
    wrong = found["wrong"]["output"]
    assert wrong["wrong"] == 16 * 64
    assert wrong["first"] == [1, 2, 80, 64]
    assert wrong["head"] == {"6": 1024}
    assert wrong["row / 64"] == {"1": 1024}
    assert wrong["row % 64 / 16"] == {"1": 1024}
    assert wrong["column / 64"] == {"1": 1024}
    unwritten = found["unwritten"]["output"]
    assert unwritten["nan"] == unwritten["unwritten"] == unwritten["wrong"] == 8 * 128
    assert families.unsafe(results) == {
        Family.of(found[name]["family"]) for name in ("error", "crash", "hangs", "late")
    }
    assert "smoke: 1 right, 2 wrong, 1 error, 1 crash, 2 hang" in done.stdout
    assert "hang    late d128 bfloat16" in done.stdout
    assert "the first at (1, 2, 80, 64)" in done.stdout.replace("[", "(").replace("]", ")")


def test_probes_on_the_cpu(tmp_path: Path) -> None:
    """The references are right: our kernels for the CPU agree with them. All kinds, in the width that is quickest."""
    results = tmp_path / "results.jsonl"
    done = run(
        "-m", "gpu.smoke", "--device", "cpu", "--results", str(results), "--only", "d64 bfloat16", "--parallel", "2"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = {line["probe"].split()[0] for line in lines.read(results)}
    assert kinds == {probe.kind for probe in probes.probes()} - {"cluster"}  # which is for wider heads


def test_the_list() -> None:
    found = probes.probes()
    names = [probe.name for probe in found]
    assert len(set(names)) == len(names)
    assert found[0].kind == "one_tile"
    for dtype in (torch.bfloat16, torch.float16):
        for dims in ((64, 64), (128, 128), (256, 256)):
            kinds = {p.kind for p in found if p.dtype == dtype and p.dims == dims and p.aligned}
            assert kinds >= {"one_tile", "plain", "causal", "softcap", "packed", "pages", "quantised"}
            assert ("cluster" in kinds) == (dims[0] > 64)
    assert {str(p.family("sm90", "forward")).split()[-1] for p in found} == {
        "plain", "cluster", "general", "split", "packed", "pages", "quantised",
    }  # fmt: skip


def test_a_hopper_gpu_has_to_take_the_kernels_for_it() -> None:
    aligned = probes.dense("plain", torch.bfloat16, (64, 64), (64, 64))
    generic = {"kernels": {"forward": "generic", "backward": "generic"}}
    assert smoke.unexpected_kernel(aligned, generic, hopper=True) == "the forward's kernel is generic, not sm90"
    assert smoke.unexpected_kernel(aligned, generic, hopper=False) is None
    assert smoke.unexpected_kernel(aligned, {"kernels": {"forward": "sm90"}}, hopper=True) is None
    assert smoke.unexpected_kernel(aligned, {}, hopper=True) is None  # it never came to a kernel
    unaligned = probes.dense("plain", torch.bfloat16, (64, 64), (64, 64), aligned=False)
    assert smoke.unexpected_kernel(unaligned, generic, hopper=True) is None
    few = probes.dense("decode", torch.bfloat16, (64, 64), (1, 1500), decodes=True)
    hopper = {"kernels": {"forward": "sm90"}}
    assert smoke.unexpected_kernel(few, generic, hopper=True) is None
    assert smoke.unexpected_kernel(few, hopper, hopper=True) == "the forward's kernel is sm90, not generic"


# ---------------------------------------------------------------------------------------------------- jobs
def job(name: str, tell: Tell) -> Facts:
    tell(begun=name)
    if name == "raises":
        raise ValueError("on purpose")
    if name == "leaves":
        return {"result": "right", "leave": True, "pid": os.getpid()}
    if name == "exits":
        os._exit(7)
    if name == "hangs":
        time.sleep(600)
    return {"result": "right", "pid": os.getpid()}


def ended(names: list[str], **options: Any) -> list[tuple[str, Facts]]:
    found: list[tuple[str, Facts]] = []
    options = {"parallel": 1, "seconds": 30, **options}
    Crew(names, job, lambda name, facts: found.append((name, facts)), **options).run()
    assert sorted(name for name, _ in found) == sorted(names)
    return found


def test_every_job_has_its_own_process_by_default() -> None:
    found = ended(["a", "b", "c"], parallel=2)
    assert len({facts["pid"] for _, facts in found}) == 3
    assert os.getpid() not in {facts["pid"] for _, facts in found}


def test_a_process_is_replaced_when_something_was_wrong_with_it() -> None:
    names = ["a", "b", "raises", "c", "leaves", "d", "exits", "e"]
    found = dict(ended(names, jobs_a_process=math.inf))
    assert found["a"]["pid"] == found["b"]["pid"]
    assert found["c"]["pid"] == found["leaves"]["pid"]
    assert len({found[name]["pid"] for name in "acde"}) == 4
    assert found["raises"]["result"] == "error"
    assert "ValueError: on purpose" in found["raises"]["error"]
    assert found["raises"]["begun"] == "raises"
    assert (found["exits"]["result"], found["exits"]["ended"]) == ("crash", "exit 7")


def test_a_job_that_hangs_is_killed_alone() -> None:
    begin = time.monotonic()
    found = dict(ended(["hangs", "a", "b"], parallel=2, seconds=1))
    assert found["hangs"]["result"] == "hang"
    assert found["hangs"]["begun"] == "hangs"
    assert found["a"]["result"] == found["b"]["result"] == "right"
    assert time.monotonic() - begin < 20


def test_jobs_that_are_not_run_have_a_reason() -> None:
    found = dict(ended(["a", "b"], skip=lambda name: "not today" if name == "b" else None))
    assert found["a"]["result"] == "right"
    assert found["b"] == {"result": "not run", "reason": "not today"}
    late = dict(ended(["a"], until=0))
    assert late["a"] == {"result": "not run", "reason": "out of time"}
    stopped = dict(ended(["hangs", "a"], until=time.monotonic() + 1))
    assert (stopped["hangs"]["result"], stopped["hangs"]["reason"]) == ("not run", "out of time")
    assert stopped["a"]["reason"] == "out of time"


# ---------------------------------------------------------------------------------------------------- lines, families
def test_lines_that_are_cut_off_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    lines.Lines(file).add("one", a=1)
    lines.Lines(file).add("two", b=torch.float32)
    with file.open("a") as more:
        more.write('{"step": "one", "cut')
    assert list(lines.read(file)) == [{"step": "one", "a": 1}, {"step": "two", "b": "torch.float32"}]
    assert [line["b"] for line in lines.read(file, "two")] == ["torch.float32"]
    assert list(lines.read(tmp_path / "none")) == []


def test_what_is_left_out_after_a_hang(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    hung = Family("sm90", "backward", "bfloat16", "128", "plain")
    lines.Lines(file).add("smoke", result="hang", family=str(hung))
    lines.Lines(file).add("smoke", result="wrong", family="sm90 forward bfloat16 64 plain")
    lines.Lines(file).add("correctness", result="crash")
    unsafe = families.unsafe(file)
    assert unsafe == {hung}
    assert families.reason(hung, unsafe) == "sm90 backward bfloat16 128 plain hung or faulted"
    assert families.reason(Family("sm90", "forward", "bfloat16", "128", "plain"), unsafe) is None
    assert families.reason(Family(dtype="bfloat16", width="128"), unsafe) is not None
    assert Family.of(str(Family(dtype="bfloat16", width="128"))) == Family(dtype="bfloat16", width="128")


@pytest.mark.parametrize(
    ("dims", "name"),
    [((1, 8), "64"), ((65, 3), "128"), ((192, 128), "192/128"), ((130, 130), "256"), ((300, 8), "wide")],
)
def test_widths(dims: tuple[int, int], name: str) -> None:
    assert families.width(*dims) == name


# ---------------------------------------------------------------------------------------------------- pattern
def test_results_that_are_right() -> None:
    wanted = torch.randn(2, 3, 40, 16, dtype=torch.float64)
    wanted[0, 0, 0] = -math.inf
    assert pattern.compared(wanted.bfloat16(), wanted, 1e-2)["wrong"] == 0
    assert pattern.compared(torch.empty(0, 3, 4), torch.empty(0, 3, 4), 1e-2) == {"error": 0.0, "wrong": 0}


def test_rows_count_from_the_first_one_of_their_sequence() -> None:
    wanted = torch.ones(4, 300, 8)
    found = wanted.clone()
    found[2, 170:] = 5  # rows 70 on of the second sequence
    first_rows = torch.tensor([0] * 100 + [100] * 200)
    facts = pattern.compared(found, wanted, 1e-2, first_rows=first_rows)
    assert facts["first"] == (2, 170, 0)
    assert facts["row / 64"] == {"1": 58 * 8, "2": 64 * 8, "3": 8 * 8}
    assert facts["first row of the sequence"] == {"100": 130 * 8}
    assert facts["head"] == {"2": 130 * 8}


def test_a_result_without_columns() -> None:
    wanted = torch.zeros(2, 70)
    found = wanted.clone()
    found[1, 65] = math.inf
    facts = pattern.compared(found, wanted, 1e-2, columns=False)
    assert (facts["wrong"], facts["first"], facts["head"], facts["row / 64"]) == (1, (1, 65), {"1": 1}, {"1": 1})
    assert "column % 8" not in facts
    json.dumps(facts)
    assert pattern.said("lse", facts).startswith(
        "lse: 1 of 140 elements wrong, error inf; the first at (1, 65): inf, not 0;"
    )


def test_memory_that_was_not_written_is_told_from_other_nan() -> None:
    wanted = torch.ones(1, 4, 4)
    found = wanted.bfloat16()
    found[0, 0, 0] = pattern.fill(torch.bfloat16)
    found.view(torch.int16)[0, 1, 1] = 0x7FFF  # the NaN that a GPU computes
    facts = pattern.compared(found, wanted, 1e-2)
    assert (facts["wrong"], facts["nan"], facts["unwritten"]) == (2, 2, 1)
