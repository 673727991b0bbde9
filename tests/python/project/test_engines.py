"""The comparison with other engines: its check, tables and exit code, with engines that stand in for real ones."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch

from external.engines import comparison, ours, peers
from external.engines.peers import Peer
from external.engines.workloads import PAGE, WORKLOADS, Batch, Workload
from scaledot.compare.eager import eager_attention
from scaledot.compare.timing import Effort, Timing

command = importlib.import_module("external.engines.__main__")

MIXED = Workload("2x4:2x1:200x16 + 1x4:2x6x16", is_causal=True, paged=True)
SMALL = Workload("2x4x5x16", is_causal=True)


def stand_in(name: str, change: Callable[[torch.Tensor], torch.Tensor], why_not: str | None = None) -> Peer:
    """scaledot over packed keys, with a change of its result."""

    def prepare(batch: Batch) -> ours.Run:
        run = ours.packed(batch)
        return ours.Run(run.call, lambda output: change(output))

    return Peer(name, lambda batch: why_not if batch.workload is SMALL else None, prepare)


def raises(output: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel\nfor this")


RIGHT = stand_in("right", lambda output: output)
PEERS = {
    "wrong": stand_in("wrong", lambda output: output * 1.1),
    "hides NaN": stand_in("hides NaN", lambda output: output * torch.nan),
    "raises": stand_in("raises", raises),
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command over small workloads. Of the sides that are timed, the n-th takes n ms."""

    def alternate(calls: tuple[Callable[[], Any], ...], effort: Effort) -> tuple[Timing, ...]:
        return tuple(Timing((number * 1e-3,) * effort.least, 1) for number in range(1, len(calls) + 1))

    def run(found: list[Peer], *arguments: str) -> int:
        monkeypatch.setattr(command, "load", lambda library, threads: (found, ["vLLM: needs --download"]))
        return int(command.main([*arguments]))

    monkeypatch.setattr(comparison, "alternate", alternate)
    monkeypatch.setattr(command, "load_average", lambda: 0.0)
    monkeypatch.setattr(command, "WORKLOADS", (MIXED, SMALL))
    return run


def test_the_table_of_engines_that_are_right(run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    slow = stand_in("slow", lambda output: output, why_not="its lengths are even")
    assert run([RIGHT, slow], "--dtype", "bfloat16", "--json", str(tmp_path / "readings.json")) == 0
    out, err = capsys.readouterr()
    assert "not found: vLLM: needs --download" in err
    assert out.rstrip().split("\n\n")[1:] == [
        "| right, bfloat16 | its time | packed | pages | per head |\n|---|---|---|---|---|\n"
        f"| {MIXED} | 4.00 ms | 4.00x | 2.00x | 1.33x |\n"
        f"| {SMALL} | 3.00 ms | 3.00x | - | 1.50x |\n"
        "| geometric mean | | 3.46x | 2.00x | 1.41x |",
        "| slow, bfloat16 | its time | packed | pages | per head |\n|---|---|---|---|---|\n"
        f"| {MIXED} | 5.00 ms | 5.00x | 2.50x | 1.67x |\n"
        "| geometric mean | | 5.00x | 2.50x | 1.67x |",
        "Not among what it runs: 1 (its lengths are even).",
    ]
    mixed = json.loads((tmp_path / "readings.json").read_text())["rows"][0]
    assert mixed["ratios"]["slow / pages"] == 2.5
    assert len(mixed["timings"]["right"]["readings"]) == 7
    assert 0 < mixed["errors"]["right"] < 1e-2


@pytest.mark.parametrize("name", PEERS)
def test_an_engine_that_is_wrong_or_raises_is_marked_and_not_timed(
    name: str, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([PEERS[name], RIGHT], "--dtype", "float32", "--only", "causal") == 1
    out = capsys.readouterr().out
    mark, problem = ("RuntimeError", "no kernel for this") if name == "raises" else ("wrong", "wrong: error")
    assert f"| {MIXED} | **{mark}** | - | - | - |\n| {SMALL} | **{mark}** | - | - | - |\n| geometric mean | | -" in out
    assert f"- {name}, float32, {SMALL}: " in out
    assert problem in out
    assert f"| {MIXED} | 4.00 ms |" in out  # the others are timed


def test_only_what_is_named_runs_and_nothing_is_a_failure(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([PEERS["wrong"], RIGHT], "--only", "right, float32, 2x4x5x16") == 0
    assert str(MIXED) not in capsys.readouterr().out
    assert run([RIGHT], "--only", "no such shape") == 1
    assert run([]) == 1


@pytest.mark.parametrize("workload", [MIXED, SMALL], ids=str)
def test_the_oracle_and_every_layout_are_eager_attention(workload: Workload) -> None:
    batch = Batch(workload, torch.float32)
    parts = []
    for number, (rows, keys) in enumerate(zip(batch.rows, batch.keys, strict=True)):
        row, key = int(batch.row_bounds[number]), int(batch.key_bounds[number])
        tensors = (batch.query[row : row + rows], batch.key[key : key + keys], batch.value[key : key + keys])
        query, keys_of, values = (t.double().transpose(0, 1)[None] for t in tensors)
        masked = torch.arange(keys) > torch.arange(rows)[:, None] + (keys - rows)
        output = eager_attention(query, keys_of, values, masked)
        assert isinstance(output, torch.Tensor)
        parts.append(ours.tokens_first(output))
    torch.testing.assert_close(ours.exact(batch), torch.cat(parts), rtol=1e-12, atol=1e-12)
    for name, prepare in ours.LAYOUTS.items():
        if workload.paged or name != "pages":
            run = prepare(batch)
            torch.testing.assert_close(run.output(run.call()), torch.cat(parts).float(), msg=name)


def test_pages_are_of_one_sequence_each() -> None:
    batch = Batch(MIXED, torch.float32)
    assert batch.table.tolist() == [[1, 2], [3, 4], [5, 0]]
    assert batch.pages == 6
    assert batch.slots.tolist() == [*range(PAGE, PAGE + 200), *range(3 * PAGE, 3 * PAGE + 200), *range(640, 646)]


def test_every_workload_has_shapes_with_the_same_heads() -> None:
    assert len(set(WORKLOADS)) == len(WORKLOADS)
    for workload in WORKLOADS:
        assert len({(s.heads, s.kv_heads, s.head_dim, s.value_dim) for s in workload.shapes}) == 1


def test_operators_on_dense_tensors_refuse_other_batches() -> None:
    for text, reason in {"1x4x5x16 + 1x4x6x16": "one length", "1x4:2x5x16": "share", "1x4x5:6x16": "square"}.items():
        assert reason in str(peers.not_dense(Batch(Workload(text, is_causal=True), torch.float32)))
    for text in ("2x4x5x16", "2x4x1:6x16"):
        assert peers.not_dense(Batch(Workload(text, is_causal=True), torch.float32)) is None


def test_missing_engines_are_named_with_what_installs_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("openvino", "onnxruntime", "onnx"):
        monkeypatch.setitem(sys.modules, name, None)
    found, missing = peers.load(tmp_path / "_C.abi3.so", 1)
    assert not found
    needs = ("--download", "pip install openvino", "pip install onnxruntime onnx")
    assert all(f"needs {words}" in line for words, line in zip(needs, missing, strict=True))


def test_the_download_keeps_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SCALEDOT_CACHE", str(tmp_path))

    def download(requirement: str, folder: Path) -> ZipFile:
        assert requirement == peers.VLLM
        with ZipFile(folder / "wheel", "w") as wheel:
            for isa in ("", "_AVX512", "_AVX2"):
                wheel.writestr(f"vllm/_C{isa}.abi3.so", "a library")
        return ZipFile(folder / "wheel")

    monkeypatch.setattr(peers, "download", download)
    library = peers.vllm_library(fetch=False)
    assert not library.exists()
    for _ in range(2):
        assert peers.vllm_library(fetch=True) == library
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == [library]
        monkeypatch.delattr(peers, "download", raising=False)  # it is not called again
