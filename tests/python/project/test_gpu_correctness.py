"""The tests for GPUs in forked processes: tests/gpu/correctness.py, with tests that fail, fault and hang on purpose."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpu import correctness, lines
from gpu.families import Family
from gpu.report import source_package

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = os.pathsep.join(map(str, (*source_package(), ROOT / "tests", ROOT / "tests" / "library")))

STAND_IN = """
import os, signal, time
import pytest, torch
from cases import Case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
processes = []


def lost():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_passes(capsys):
    print("seen")
    assert capsys.readouterr().out == "seen\\n"
    processes.append(os.getpid())


def test_fails():
    assert processes, "the process is that of test_passes"  # which comes first
    raise AssertionError("wrong numbers")


def test_faults():
    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, lost
    raise RuntimeError("what the test saw")


def test_has_a_new_process():
    assert not processes
    assert not torch.cuda.is_initialized()


def test_crashes():
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize("number", range(4))
def test_hangs(number):
    time.sleep(600)


@pytest.mark.skip(reason="too few GPUs")
def test_is_skipped():
    pass


CASES = [Case(f"{dim}-{dtype}", head_dim=dim, dtype=dtype) for dim in (64, 128) for dtype in ("bfloat16", "float32")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward(case):
    if case.name == "64-bfloat16":
        time.sleep(600)


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_backward(case):
    pass
"""


def test_stand_ins_that_fail_fault_and_hang(tmp_path: Path) -> None:
    file, results = tmp_path / "test_stand_in.py", tmp_path / "results.jsonl"
    file.write_text(STAND_IN)
    words = ["--tests", str(file), "--results", str(results), "--parallel", "1", "--seconds", "1.5"]
    command = [sys.executable, "-m", "gpu.correctness", *words, "-p", "no:randomly"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": FOLDERS}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = {line["test"]: line for line in lines.read(results, "correctness")}
    assert {name: line["result"] for name, line in found.items()} == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_faults": "error",
        "test_has_a_new_process": "passed",
        "test_crashes": "crash",
        "test_hangs[0]": "hang",
        "test_hangs[1]": "hang",
        "test_hangs[2]": "not run",
        "test_hangs[3]": "not run",
        "test_is_skipped": "skipped",
        "test_forward[64-bfloat16]": "hang",
        "test_forward[64-float32]": "passed",
        "test_forward[128-bfloat16]": "passed",
        "test_forward[128-float32]": "passed",
        "test_backward[64-bfloat16]": "not run",  # its forward hung
        "test_backward[64-float32]": "passed",
    }
    assert "wrong numbers" in found["test_fails"]["why"]
    assert "what the test saw" in found["test_faults"]["why"]
    assert found["test_is_skipped"]["why"] == "Skipped: too few GPUs"
    assert found["test_hangs[2]"]["reason"] == "2 other tests of test_hangs hung or faulted"
    assert found["test_backward[64-bfloat16]"]["reason"].endswith("hung or faulted")
    assert "hang    test_forward[64-bfloat16]" in done.stdout


def test_without_a_gpu_all_tests_are_skipped(tmp_path: Path) -> None:
    file, results = tmp_path / "test_stand_in.py", tmp_path / "results.jsonl"
    file.write_text(STAND_IN)
    words = ["--tests", str(file), "--results", str(results), "--gpus", "0"]
    command = [sys.executable, "-m", "gpu.correctness", *words]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": FOLDERS}, capture_output=True, check=True)
    assert {line["result"] for line in lines.read(results)} == {"skipped"}


def test_families_of_tests() -> None:
    class Item:
        def __init__(self, function: str, **params: object) -> None:
            self.originalname = function
            if params:
                self.callspec = type("Callspec", (), {"params": params})()

    packed, cache = Item("test_packed_sequences", dims=(192, 128)), Item("test_quantised_cache", dtype="float16")
    assert correctness.families_of(packed) == [Family("", "forward", "bfloat16", "192/128", "packed")]
    assert correctness.families_of(cache) == [Family("", "forward", "float16", "128", "quantised")]
    assert correctness.families_of(Item("test_autocast")) == []
