"""tests/gpu, tried without a GPU, so that no minute of one is spent on a typo."""

from __future__ import annotations

import inspect
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import scaledot
from gpu import bench, races, report, small
from gpu.report import Report, run_steps

PYTHON = [sys.executable, "-c"]
RUNS = ["configure", "build", "import", "correctness", "memcheck", "racecheck", "races", "bench"]


@pytest.fixture
def new(tmp_path: Path) -> Report:
    return Report(tmp_path / "out" / "gpu.json", tmp_path / "build")


def steps_of(report: Report) -> dict[str, Any]:
    return json.loads(report.path.read_text())["steps"]


def test_a_step_that_succeeds(new: Report) -> None:
    assert new.run("hello", [*PYTHON, "import os; print('hello from', os.environ['PYTHONPATH'])"], 30)
    found = steps_of(new)["hello"]
    assert found["exit"] == 0
    assert found["output"].strip() == f"hello from {report.ROOT / 'python'}"


def test_a_step_that_fails(new: Report) -> None:
    assert not new.run("broken", [*PYTHON, "print('so far'); raise SystemExit(3)"], 30)
    assert steps_of(new)["broken"]["exit"] == 3
    assert "so far" in steps_of(new)["broken"]["output"]


def test_a_step_that_takes_too_long_leaves_what_it_said(new: Report) -> None:
    assert not new.run("slow", [*PYTHON, "import time; print('so far', flush=True); time.sleep(60)"], 2)
    assert steps_of(new)["slow"]["exit"] == "stopped after 2 s"
    assert "so far" in steps_of(new)["slow"]["output"]


def test_a_program_that_is_not_there(new: Report) -> None:
    assert not new.run("missing", ["no-such-program"], 5)
    assert "no-such-program" in steps_of(new)["missing"]["exit"]


def test_no_step_begins_when_the_time_is_up(tmp_path: Path) -> None:
    late = Report(tmp_path / "gpu.json", tmp_path / "build", seconds=1)
    assert not late.run("late", ["no-such-program"], 60)
    assert steps_of(late)["late"]["exit"] == "not run: out of time"


def test_the_report_is_there_from_the_start_and_during_a_step(new: Report) -> None:
    assert json.loads(new.path.read_text())["machine"]["torch"] == torch.__version__
    show = f"import json; print(json.load(open({str(new.path)!r}))['steps']['looks']['exit'])"
    assert new.run("looks", [*PYTHON, show], 30)
    assert steps_of(new)["looks"]["output"].strip() == "running"


def test_steps_go_on_after_one_that_raises(new: Report) -> None:
    def raises(_: Report) -> bool:
        raise KeyError("a typo")

    def runs(later: Report) -> bool:
        return later.run("later", [*PYTHON, "pass"], 30)

    assert not run_steps(new, {"raises": raises, "runs": runs})
    assert "a typo" in steps_of(new)["raises (report.py)"]["exit"]
    assert steps_of(new)["later"]["exit"] == 0


def test_without_a_library_nothing_else_is_tried(new: Report) -> None:
    def never(_: Report) -> bool:
        raise AssertionError

    assert not run_steps(new, {"build": lambda _: False, "bench": never})
    assert steps_of(new) == {"bench": {"exit": "not run: the build failed"}}


def test_the_limits_of_the_steps_fit_into_nine_minutes(new: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, float] = {}
    monkeypatch.setattr(new, "run", lambda name, command, seconds: limits.__setitem__(name, seconds) or True)
    assert run_steps(new, dict(report.STEPS))
    assert list(limits) == RUNS
    assert report.SECONDS <= 9 * 60


def test_a_dry_run_says_what_it_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs nothing, writes nothing, and fails if a program is missing."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("nvcc", "compute-sanitizer", "cmake", "ninja"):
        (tools / name).write_text("#!/bin/sh\nexit 1\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CUDACXX", raising=False)
    before = sorted(path for path in tmp_path.rglob("*"))
    assert report.dry_run(tmp_path / "gpu.json", report.STEPS) == 0
    said = capsys.readouterr().out
    for name in RUNS:
        assert f"== {name}, at most " in said
    for part in ("CUDA graphs", "two devices", "1,000 runs", "compute-sanitizer", "flash, cuDNN and efficient"):
        assert part in said
    assert str(tmp_path / "gpu.json") in said
    assert f"--table {tmp_path / 'gpu.md'} " in said
    assert sorted(path for path in tmp_path.rglob("*")) == before
    (tools / "nvcc").unlink()
    assert report.dry_run(tmp_path / "gpu.json", report.STEPS) == 1
    assert capsys.readouterr().err == "nvcc: not found\n"
    monkeypatch.setattr(report, "ROOT", tmp_path)
    assert report.dry_run(tmp_path / "gpu.json", {"races": report.races}) == 1
    assert capsys.readouterr().err == "tests/gpu/races.py: not found\n"


def test_the_time_for_all_steps_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.dry_run(tmp_path / "gpu.json", {}, seconds=1500) == 0
    assert "It would take at most 1500 s" in capsys.readouterr().out


def test_no_step_uses_the_multi_process_service(new: Report) -> None:
    """Its clients look for its pipes in a folder."""
    show = "import os; print(os.path.exists(os.environ['CUDA_MPS_PIPE_DIRECTORY']))"
    assert new.run("mps", [*PYTHON, show], 30)
    assert steps_of(new)["mps"]["output"].strip() == "False"


def test_counts_of_a_junit_file(tmp_path: Path) -> None:
    file = tmp_path / "tests.xml"
    file.write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1"><testcase name="good"/>'
        '<testcase name="bad"><failure/></testcase><testcase name="not here"><skipped message="too few"/></testcase>'
        "</testsuite></testsuites>"
    )
    counted = {"tests": 3, "failures": 1, "errors": 0, "skipped": 1, "failed": ["bad"], "skips": {"too few": 1}}
    assert report.counts(file) == counted


def test_the_commit_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEDOT_COMMIT", "abc123")
    assert report.commit() == "abc123"
    monkeypatch.delenv("SCALEDOT_COMMIT")
    monkeypatch.setenv("PATH", "")
    assert report.commit() == "unknown"


def test_small_runs_every_call_that_it_makes() -> None:
    small.main("cpu")


def test_races_runs_every_call_that_it_makes(capsys: pytest.CaptureFixture[str]) -> None:
    assert races.main("cpu", runs=2, length=40) == 0
    assert len(races.calls("cpu", 4)) == len(capsys.readouterr().out.splitlines()) == 34


def test_races_are_found() -> None:
    """A call whose bits differ in one run, and one that takes too long."""
    found = [torch.zeros(3), torch.zeros(3), torch.tensor([0.0, -0.0, 0.0]), torch.zeros(3)]
    work, results = races.OtherWork("cpu"), iter(found)
    assert races.runs_with_other_bits(lambda: [next(results)], 4, work, math.inf) == (1, 4)
    assert races.runs_with_other_bits(lambda: [found[0]], 1000, work, 0) == (0, races.COMPARED_TOGETHER)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_every_kind_of_work_is_measured() -> None:
    kinds: dict[tuple[object, ...], bench.Work] = {}
    for work in bench.works(tokens=64, width=128, longest=96):
        kinds.setdefault((work.kind, work.direction, work.head_dim == work.value_dim, work.cache), work)
    assert len(kinds) == 31
    written: list[int] = []
    found = bench.run(list(kinds.values()), "cpu", 60, lambda so_far: written.append(len(so_far["rows"])))
    assert written == list(range(1, len(kinds) + 1))
    json.dumps(found, default=str)
    for row in found["rows"]:
        assert "wrong" not in row, row
        assert row["times"]["ours"]["ms"] > 0
        kind = row["name"].split()[1]
        assert ("varlen" in row["refused"]) == kind.startswith("packed")  # torch has it for GPUs only
        if kind == "packed_causal":  # on a CPU, torch takes no causal nested tensors
            assert "No viable backend" in row["refused"]["default"]
        else:
            assert row["ratio"] > 0
            assert kind == "dropout" or row["error"] < 1e-2
    machine, empty, *lines = bench.table(found).splitlines()
    assert machine.startswith(f"no GPU, torch {torch.__version__}, ")
    assert not empty
    assert len(lines) == 2 + len(kinds)
    assert {line.count("|") for line in lines} == {10}
    assert lines[0].split(" | ")[2:-1] == ["ours", "default", "flash", "cudnn", "efficient", "varlen"]
    lost = bench.table({"machine": "", "rows": [{"name": "a", "wrong": "out of time"}]}).splitlines()[-1]
    assert lost.startswith("| a | out of time |")
    assert lost.count("|") == 10


def test_an_option_is_compared_with_the_plain_row_of_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a cache has no other bar."""
    wanted = [w for w in bench.works() if w.kind in ("plain", "cache") and w.direction == "forward"]

    def measure(work: bench.Work, device: str) -> dict[str, Any]:
        slow = work.cache == torch.int8
        times = {"ours": {"ms": 1.5 if slow else 1.2 if work.cache else 1.0}}
        return {"name": work.name, "kernel": "sm90", "times": times, "tflops": {"ours": 1.0}}

    monkeypatch.setattr(bench, "measure", measure)
    rows = dict(zip(wanted, bench.run(wanted, "cpu", 60, lambda _: None)["rows"], strict=True))
    caches = {work: row for work, row in rows.items() if work.cache}
    assert len(caches) == 6
    for work, row in caches.items():
        assert row["over_plain"] == row["times"]["ours"]["ms"]
        assert row["met"] == (work.cache != torch.int8)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_packed_sequences_have_the_arguments_of_torchs_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's function for them needs a GPU, so a stand-in gets its call and gives our results."""
    import torch.nn.attention.varlen as torch_varlen

    signature = inspect.signature(torch_varlen.varlen_attn)

    def stand_in(*arguments: Any, **options: Any) -> Tensor:
        given = signature.bind(*arguments, **options).arguments
        assert given["cu_seq_q"].dtype == torch.int32
        return scaledot.varlen_attention(**given)

    monkeypatch.setattr(torch_varlen, "varlen_attn", stand_in)
    wanted = {w.name.split(" ")[1]: w for w in bench.works(64, 128, 96) if w.is_packed}
    assert wanted.keys() == {"packed", "packed_causal"}
    for work in wanted.values():
        row = bench.measure(work, "cpu")
        assert row["times"]["varlen"]["ms"] > 0
        assert row["error"] < 1e-2


def test_operations_of_unequal_widths_and_of_packed_sequences() -> None:
    works = {work.name: work for work in bench.works()}
    forward = works["forward plain d192/128 bfloat16 4096x4096"]
    assert forward.operations == 2 * 4 * 16 * 4096 * 4096 * (192 + 128)
    backward = works["backward causal d192/128 bfloat16 4096x4096"]
    assert backward.operations == 4 * 16 * 4096 * 4096 * (3 * 192 + 2 * 128)
    packed = works["backward packed_causal d128 bfloat16 2048x2048"]
    assert packed.operations == 5 * 128 * 16 * 4 * (1024**2 + 3072**2)


def test_the_bars_of_the_table() -> None:
    bars = {work.name: (work.bar_tflops, work.bar_ratio) for work in bench.works()}
    assert bars["forward plain d128 bfloat16 4096x4096"] == (620, 1)
    assert bars["forward causal d64 bfloat16 16384x16384"] == (430, 1)
    assert bars["backward causal d128 bfloat16 8192x8192"] == (450, 0.95)
    assert bars["backward bias d128 bfloat16 4096x4096"] == (0, 2)
    assert bars["forward plain d128 float32 4096x4096"] == (0, 1.2)
    work = next(w for w in bench.works() if w.name == "forward causal d128 bfloat16 4096x4096")
    assert work.operations == 2 * 4 * 16 * 4096 * 4096 * 128


def test_rows_without_time_say_so() -> None:
    found = bench.run(bench.works(64, 128, 96)[:2], "cpu", 0, lambda _: None)
    assert [row["wrong"] for row in found["rows"]] == ["out of time"] * 2


def test_a_result_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    work = bench.works(64, 128, 96)[0]
    monkeypatch.setattr(bench.Problem, "torchs", lambda self: self.query * torch.nan)
    row = bench.measure(work, "cpu")
    assert "times" not in row
    assert "inf from torch's" in row["wrong"]
    assert "inf from torch's" in bench.line(row)


def test_an_option_is_compared_with_the_plain_work() -> None:
    wanted = [w for w in bench.works(64, 128, 96) if w.queries == 16 and w.direction == "forward" and w.head_dim == 128]
    wanted = [w for w in wanted if w.dtype == torch.bfloat16 and w.kind in ("plain", "window")]
    found = bench.run(wanted, "cpu", 60, lambda _: None)
    plain, window = found["rows"]
    assert window["over_plain"] == pytest.approx(window["times"]["ours"]["ms"] / plain["times"]["ours"]["ms"])
