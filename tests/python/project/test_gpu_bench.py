"""The bench, the search for races, and the calls for compute-sanitizer of tests/gpu, tried without a GPU."""

from __future__ import annotations

import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import scaledot
from gpu import bench, kernel_times, lines, races, small, workloads
from gpu.families import Family
from gpu.report import source_package

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = os.pathsep.join(map(str, (*source_package(), ROOT / "tests", ROOT / "tests" / "library")))


def measured(works: Iterable[workloads.Work]) -> bench.Table:
    table = bench.Table()
    for work in works:
        table.ended(work, bench.measure(work, "cpu"))
    return table


def test_the_times_of_kernels() -> None:
    found = kernel_times.times((2, 64), 128, "cpu")
    assert found.keys() == {"forward", "backward"}
    for kernels in found.values():
        total, *each = kernels.values()
        assert total == pytest.approx(sum(each), abs=0.1 * len(each))
    name = "void scaledot::(anonymous namespace)::sm90_forward_kernel<scaledot::Config<64>>(scaledot::Problem)"
    assert kernel_times.short(name) == "sm90_forward_kernel<Config<64>>"


def test_small_runs_every_call_that_it_makes() -> None:
    calls = list(small.Calls("cpu").all())
    assert len({name for name, _, _ in calls}) == len(calls)
    for _, _, call in calls:
        call()


def test_races_runs_every_call_that_it_makes() -> None:
    every = races.workloads("cpu", 40)
    assert len({workload.name for workload in every}) == 34
    for workload in every:
        found = races.runs_with_other_bits(workload.make(), 2, races.OtherWork("cpu"), math.inf)
        assert found == (0, 2)


def test_races_are_found() -> None:
    """A call whose bits differ in one run, and one that takes too long."""
    found = [torch.zeros(3), torch.zeros(3), torch.tensor([0.0, -0.0, 0.0]), torch.zeros(3)]
    work, results = races.OtherWork("cpu"), iter(found)
    assert races.runs_with_other_bits(lambda: [next(results)], 4, work, math.inf) == (1, 4)
    assert races.runs_with_other_bits(lambda: [found[0]], 1000, work, 0) == (0, races.COMPARED_TOGETHER)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_every_kind_of_work_is_measured() -> None:
    kinds: dict[tuple[object, ...], workloads.Work] = {}
    for work in workloads.works(tokens=64, width=128, longest=96):
        kinds.setdefault((work.kind, work.direction, work.head_dim == work.value_dim, work.cache), work)
    assert len(kinds) == 34
    found = measured(kinds.values())
    found.ended(None, bench.ceilings("cpu"))
    json.dumps(found.rows, default=str)
    for row in found.rows:
        assert "wrong" not in row, row
        assert row["times"]["ours"]["ms"] > 0
        kind = row["name"].split()[1]
        assert ("varlen" in row["refused"]) == kind.startswith("packed")  # torch has it for GPUs only
        if kind == "packed_causal":  # on a CPU, torch takes no causal nested tensors
            assert "No viable backend" in row["refused"]["default"]
        else:
            assert row["ratio"] > 0
            assert kind == "dropout" or row["error"] < 1e-2
    machine, empty, *lines = bench.text_of(found).splitlines()
    assert machine.startswith(f"no GPU, torch {torch.__version__}, ")
    assert not empty
    assert len(lines) == 2 + len(kinds)
    assert {line.count("|") for line in lines} == {10}
    assert lines[0].split(" | ")[2:-1] == ["ours", "default", "flash", "cudnn", "efficient", "varlen"]
    name = workloads.works()[0].name
    lost = bench.Table()
    lost.ended(workloads.works()[0], {"result": "not run", "reason": "out of time"})
    line = bench.text_of(lost).splitlines()[-1]
    assert line.startswith(f"| {name} | not run out of time |")
    assert line.count("|") == 10


def test_an_option_is_compared_with_the_plain_row_of_its_shape() -> None:
    """A row of a cache has no other bar."""
    wanted = [w for w in workloads.works() if w.kind in ("plain", "cache") and w.direction == "forward"]

    found = bench.Table()
    for work in wanted:
        times = {"ours": {"ms": 1.5 if work.cache == torch.int8 else 1.2 if work.cache else 1.0}}
        found.ended(work, {"name": work.name, "kernel": "sm90", "times": times, "tflops": {"ours": 1.0}})
    rows = dict(found.works)
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
    wanted = {w.name.split(" ")[1]: w for w in workloads.works(64, 128, 96) if w.is_packed}
    assert wanted.keys() == {"packed", "packed_causal"}
    for work in wanted.values():
        row = bench.measure(work, "cpu")
        assert row["times"]["varlen"]["ms"] > 0
        assert row["error"] < 1e-2


def test_operations_of_unequal_widths_and_of_packed_sequences() -> None:
    works = {work.name: work for work in workloads.works()}
    forward = works["forward plain d192/128 bfloat16 4096x4096"]
    assert forward.operations == 2 * 4 * 16 * 4096 * 4096 * (192 + 128)
    backward = works["backward causal d192/128 bfloat16 4096x4096"]
    assert backward.operations == 4 * 16 * 4096 * 4096 * (3 * 192 + 2 * 128)
    packed = works["backward packed_causal d128 bfloat16 2048x2048"]
    assert packed.operations == 5 * 128 * 16 * 4 * (1024**2 + 3072**2)


def test_the_bars_of_the_table() -> None:
    bars = {work.name: (work.bar_tflops, work.bar_ratio) for work in workloads.works()}
    assert bars["forward plain d128 bfloat16 4096x4096"] == (620, 1)
    assert bars["forward causal d64 bfloat16 16384x16384"] == (430, 1)
    assert bars["backward causal d128 bfloat16 8192x8192"] == (450, 0.95)
    assert bars["backward bias d128 bfloat16 4096x4096"] == (0, 2)
    assert bars["forward plain d128 float32 4096x4096"] == (0, 1.2)
    work = next(w for w in workloads.works() if w.name == "forward causal d128 bfloat16 4096x4096")
    assert work.operations == 2 * 4 * 16 * 4096 * 4096 * 128


def test_rows_that_were_not_measured_say_why() -> None:
    told: list[dict[str, Any]] = []
    found = bench.Table(told.append)
    work = workloads.works()[0]
    found.ended(work, {"result": "hang", "seconds": 30})
    found.ended(work, {"result": "error", "error": "Traceback\nRuntimeError: CUDA error"})
    found.ended(work, {"result": "crash", "ended": "signal 6"})
    assert [row["wrong"] for row in told] == ["hang", "error RuntimeError: CUDA error", "crash signal 6"]


def test_a_row_of_a_family_that_hung_is_left_out() -> None:
    work = workloads.works(64, 128, 96)[0]
    kernel = bench.measure(work, "cpu")["kernel"]
    row = bench.measure(work, "cpu", {work.family(kernel)})
    assert row["wrong"] == f"{work.family(kernel)} hung or faulted"
    assert "times" not in bench.measure(work, "cpu", {Family(dtype="bfloat16")})


def test_the_rows_that_matter_most_come_first() -> None:
    rows = workloads.works()
    assert len({row.name for row in rows}) == len(rows)
    assert {(row.direction, row.queries) for row in rows[:12]} >= {
        ("both", 1024),
        ("training", 1024),
        ("training", 128),
    }
    assert {row.family("").kind for row in rows[:12]} >= {"plain", "packed", "split", "cluster"}
    both, backward = (
        next(row for row in rows if row.direction == name and row.queries == 1024) for name in ("both", "backward")
    )
    assert both.operations == backward.operations * 7 / 5


def test_the_program_writes_a_line_and_a_table_as_it_goes(tmp_path: Path) -> None:
    results, table = tmp_path / "results.jsonl", tmp_path / "bench.md"
    words = ["--device", "cpu", "--tokens", "64", "--width", "128", "--longest", "96", "--rows", "2"]
    command = [sys.executable, "-m", "gpu.bench", "--results", str(results), "--table", str(table), *words]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": FOLDERS}, check=True, capture_output=True)
    assert [line["result"] for line in lines.read(results, "bench")] == ["ceilings", "measured", "measured"]
    assert len(table.read_text().splitlines()) == 2 + 2 + 2


def test_a_result_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    work = workloads.works(64, 128, 96)[0]
    monkeypatch.setattr(bench.Problem, "torchs", lambda self: self.query * torch.nan)
    row = bench.measure(work, "cpu")
    assert "times" not in row
    assert "inf from torch's" in row["wrong"]
    assert "inf from torch's" in bench.line(row)


def test_an_option_is_compared_with_the_plain_work() -> None:
    wanted = [w for w in workloads.works(64, 128, 96) if w.kind in ("plain", "window") and w.direction == "forward"]
    wanted = [w for w in wanted if w.queries == 16 and w.head_dim == 128 and w.dtype == torch.bfloat16]
    plain, window = sorted(measured(wanted).rows, key=lambda row: "window" in row["name"])
    assert window["over_plain"] == pytest.approx(window["times"]["ours"]["ms"] / plain["times"]["ours"]["ms"])
