"""python -m scaledot compare: timing, the table, the JSON file, the plot and the options."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import scaledot
from command_line import SMALL, TINY, only_case, picture_size, refused
from scaledot.__main__ import main
from scaledot.compare import run
from scaledot.compare.report import geomean, ratio_of, time_of
from scaledot.compare.timing import Effort, alternate

pytest.importorskip("matplotlib")

CPU = torch.device("cpu")


def test_sides_are_timed_in_turn() -> None:
    order = []
    timings = alternate((lambda: order.append("a"), lambda: order.append("b")), Effort(0.0, 3))
    text = "".join(order)
    calls = [timing.calls for timing in timings]
    turn = "a" * calls[0] + "b" * calls[1]
    assert text == "abab" + turn * 3  # a warm-up call and a trial reading of each come first
    for timing in timings:
        assert len(timing.readings) == 3
        assert min(timing.readings) <= timing.median <= max(timing.readings)


def test_peer_is_skipped_if_it_needs_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "free_memory", lambda device: 10_000)
    row = run.run_case(only_case("dropout"), CPU, ["forward"], Effort(0.0, 1), "sdpa", lambda part: None)
    assert row.verdict.passed
    assert row.peer_skipped is not None
    assert row.passes["forward"].peer is None
    assert row.passes["forward"].ratio is None


def test_formatting_of_times_and_ratios() -> None:
    assert [time_of(t) for t in (1.234e-7, 9.999e-6, 1.2345e-3, 0.0999, 2.5)] == [
        "0.12 us",
        "10.0 us",
        "1.23 ms",
        "99.9 ms",
        "2.50 s",
    ]
    assert [ratio_of(r) for r in (None, 0.5, 9.999, 833.8)] == ["-", "0.50x", "10.0x", "834x"]
    assert geomean([1.0, 4.0]) == pytest.approx(2.0)


def test_compare_in_a_subprocess(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    options = ["--shapes", "1x2x24x16,1x2x1:200x16", "--dtype", "bfloat16", "--pass", "forward,backward,total"]
    command = [sys.executable, "-m", "scaledot", *TINY, *options, *files, "--threads", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "NO_COLOR": "1"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.match(r"\d+ cases: about \d+ seconds of timing, and more for the checks\n", ran.stdout)
    assert "1 thread of" in ran.stdout
    assert torch.__version__ in ran.stdout
    assert "cases are right" in ran.stdout
    assert "\033" not in ran.stdout
    width, height = picture_size(tmp_path / "out.png")
    assert width > 1000
    assert height > 1000

    report = json.loads((tmp_path / "out.json").read_text())
    assert report["format"] == 1
    assert report["passed"] is True
    assert report["options"]["complete"] is True
    assert {"name", "cpu", "threads", "torch", "scaledot", "capability"} <= set(report["machine"])
    assert {(c["feature"], c["shape"]["text"]) for c in report["cases"]} >= {
        ("plain", "1x2x24x16"),
        ("gqa", "1x2:1x24x16"),
        ("plain", "1x2x1:200x16"),
    }
    for case in report["cases"]:
        assert case["correctness"]["passed"]
        assert {"ours", "peer", "eager", "allowed", "scale"} <= set(case["correctness"]["errors"]["output"])
        only_forward = case["feature"].startswith("cache_")
        assert set(case["passes"]) == ({"forward"} if only_forward else {"forward", "backward", "total"})
        for one in case["passes"].values():
            for side in ("scaledot", "torch"):
                times = one[side]
                assert len(times["readings"]) >= 5
                assert times["min"] <= times["median"] <= times["max"]
            assert one["ratio"] == pytest.approx(one["torch"]["median"] / one["scaledot"]["median"])
            assert one["kernel"] in scaledot.build_info()["cpu_kernels"]
    assert {"group", "dtype", "pass", "geomean", "smallest"} == set(report["summary"][0])


@pytest.mark.skipif(scaledot.cpu_capability() == "default", reason="needs AVX2")
def test_both_sides_lowered_to_avx2(tmp_path: Path) -> None:
    options = ["--shapes", "1x1x5x64", "--features", "plain", "--pass", "forward", "--json", str(tmp_path / "out.json")]
    env = {**os.environ, "SCALEDOT_CPU_CAPABILITY": "avx2", "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-m", "scaledot", *TINY, *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "instructions: scaledot avx2, torch AVX2" in ran.stdout
    cases = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert len(cases) == 3
    assert all(case["passes"]["forward"]["kernel"].startswith("avx2") for case in cases)


def test_wrong_case_is_reported_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    right = scaledot.scaled_dot_product_attention
    monkeypatch.setattr(
        scaledot,
        "scaled_dot_product_attention",
        lambda *tensors, is_causal=False, **options: right(*tensors, **options),
    )
    assert main([*SMALL, "--json", str(tmp_path / "out.json")]) == 1
    out = capsys.readouterr().out
    assert "FAIL  output: error" in out
    assert "FAIL: 1 of 2 cases are wrong." in out
    cases = {case["feature"]: case for case in json.loads((tmp_path / "out.json").read_text())["cases"]}
    assert cases["plain"]["passes"]
    assert cases["causal"]["passes"] == {}
    assert cases["causal"]["correctness"]["problems"]


def test_exception_makes_a_case_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def attention(*tensors: torch.Tensor, **options: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(scaledot, "scaled_dot_product_attention", attention)
    assert main(SMALL) == 1
    assert "FAIL  RuntimeError: no such kernel" in capsys.readouterr().out


def test_interrupt_keeps_the_finished_cases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    measured = []

    def interrupted(*arguments: Any) -> run.Row:
        if measured:
            raise KeyboardInterrupt
        measured.append(run.run_case(*arguments))
        return measured[0]

    monkeypatch.setattr("scaledot.compare.command.run_case", interrupted)
    assert main([*SMALL, "--json", str(tmp_path / "out.json")]) == 130
    assert "Stopped after 1 of 2 cases." in capsys.readouterr().out
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["options"]["complete"] is False
    assert len(report["cases"]) == 1


def test_eager_as_the_peer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--peer", "eager"]) == 0
    out = capsys.readouterr().out
    assert "eager" in out
    assert "F.sdpa" not in out


def test_without_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main(SMALL) == 0
    assert "run `pip install tqdm`" in capsys.readouterr().err


def test_names_as_the_table_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL[:-4], "--dtype", "bf16,fp16,float16", "--features", "plain", "--pass", "bwd,fwd+bwd"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if " 1x2x24x16 " in line]
    assert [line[line.index("1x2x24x16") + 1 :][:2] for line in lines] == [
        [dtype, which] for dtype in ("bf16", "fp16") for which in ("bwd", "fwd+bwd")
    ]


def test_warnings_of_libraries_come_after_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = run.run_case

    def warns(*arguments: Any) -> run.Row:
        warnings.warn("this will change", FutureWarning, stacklevel=1)
        print("(warned)")
        return right(*arguments)

    monkeypatch.setattr("scaledot.compare.command.run_case", warns)
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: (shown.append(str(message)), print("(shown)")))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(SMALL) == 0
    assert shown == ["this will change"]
    out = capsys.readouterr().out
    assert out.count("(warned)") == 2
    assert out.index("(shown)") > out.rindex("\ntiny, causal  1x2x24x16 ")


def test_note_on_a_feature_that_does_not_apply(capsys: pytest.CaptureFixture[str]) -> None:
    features = ["--features", "plain,causal,gqa"]
    assert main([*TINY, "--shapes", "1x1x1:20x16", "--dtype", "bfloat16", *features]) == 0
    out = capsys.readouterr().out
    assert "causal at 1x1x1:20x16: not run: needs as many queries as keys" in out
    assert "gqa at 1x1x1:20x16: not run: needs several heads" in out


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--dtype", "int8"], "got 'int8'; needs a dtype: float32"),
        (["--dtype", "half"], "float16 (or fp32, fp64, bf16, fp16)"),
        (["--shapes", "huge"], "argument --shapes: got 'huge'; needs a set (quick, default"),
        (["--shapes", "1x8:3x5x64"], "needs query heads that are a multiple of the 3 KV heads"),
        (["--features", "plain,flash"], "got 'flash'; needs a feature: plain"),
        (["--pass", "sideways"], "got 'sideways'; needs a pass: forward"),
        (["--device", "meta"], "got 'meta'; needs cpu, cuda or cuda:N"),
        (["--device", "quantum"], "got 'quantum'; needs cpu, cuda or cuda:N"),
        (["--threads", "0"], "needs a positive integer"),
        (["--threads", "two"], "needs a positive integer"),
        (["--seconds", "-1"], "needs a positive number"),
        (["--json", "no/such/folder/x.json"], "got 'no/such/folder/x.json'; needs a file in a folder that exists"),
        (["--plot", "x.gif"], "got 'x.gif'; needs a .png, .svg or .pdf file"),
        (["--features", "gqa", "--shapes", "1x1x5x64"], "no case to run: gqa at 1x1x5x64"),
    ],
)
def test_wrong_options(options: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert what in refused(["compare", *options], capsys)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--length", "64"], "--length: got no --distributed; needs --distributed, under torchrun"),
        (["--latency", "10"], "--latency: got no --distributed"),  # though that is the default
        (["--heads", "8", "--tflops", "1"], "--heads, --tflops: got no --distributed"),
        (["--distributed", "--shapes", "quick"], "--distributed: got --shapes too; needs none of --shapes, --features"),
        (["--distributed", "--peer", "sdpa"], "--distributed: got --peer too"),
        (["--distributed", "--seconds", "1"], "--distributed: got --seconds too"),
        (["--distributed", "--dtype", "fp32,bf16"], "--dtype: got float32,bfloat16 with --distributed; needs one"),
        (["--distributed", "--device", "cuda"], "--device: got cuda with --distributed; needs cpu"),
        (["--models", "--device", "cuda"], "--device: got cuda with --models; needs cpu"),
    ],
)
def test_no_option_is_ignored(
    options: list[str], what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert what in refused(["compare", *options], capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    assert "needs a CUDA device" in refused(["compare", "--device", "cuda"], capsys)
