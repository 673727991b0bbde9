"""python -m scaledot: compare, info and heatmap."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import scaledot
import tolerances
from scaledot.__main__ import main, tokens_of
from scaledot.compare import check as rule
from scaledot.compare import run, work
from scaledot.compare.features import FEATURES, Case, cases_of
from scaledot.compare.report import geomean, ratio_of, time_of
from scaledot.compare.sample import Sample
from scaledot.compare.shapes import SETS, Entry, Shape, entries_of
from scaledot.compare.timing import Effort, alternate
from scaledot.dropin import torch_nn

pytest.importorskip("matplotlib")

CPU = torch.device("cpu")
TINY = ["compare", "--quick", "--seconds", "0.001"]


def only_case(feature: str, shape: str = "2x4x40x16", dtype: str = "bfloat16") -> Case:
    (case,), notes = cases_of((Entry((shape,), (feature,)),), None, (dtype,))
    assert not notes
    return case


def picture_size(path: Path) -> tuple[int, int]:
    from matplotlib.image import imread

    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    height, width = imread(path).shape[:2]
    return width, height


def refused(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of wrong arguments, in one line."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


# --------------------------------------------------------------------------------------------- shapes and cases
@pytest.mark.parametrize("text", ["1x8x1024x64", "1x32:8x1:4096x128", "3x4x17x20:28", "1x1x5x64"])
def test_shape_is_written_as_it_is_read(text: str) -> None:
    assert str(Shape.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("1x8x64", "not a shape"),
        ("1x8x64x64x", "not a shape"),
        ("1x8x0x64", "size of 0"),
        ("1x8:0x5x64", "size of 0"),
        ("1x8:3x5x64", "not a multiple"),
    ],
)
def test_wrong_shape(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Shape.parse(text)


@pytest.mark.parametrize("name", SETS)
def test_every_set_gives_cases(name: str) -> None:
    cases, notes = cases_of(entries_of(name), None, ("float32",))
    assert cases
    assert not notes, "a set names a feature for a shape that it does not apply to"


def test_bars_cover_the_shapes_that_are_promised() -> None:
    cases, _ = cases_of(entries_of("bars"), None, ("float32",))
    found = {(c.feature_name, str(c.shape)) for c in cases}
    for feature in ("plain", "causal", "bool_mask", "padding", "mask_grad", "dropout", "weights"):
        for length in (512, 1024, 2048, 4096):
            assert {(feature, f"1x8x{length}x{dim}") for dim in (64, 128)} <= found
    assert {("mha_weights", f"1x8x{length}x64") for length in (512, 1024, 2048, 4096)} <= found
    assert ("mha_weights", "1x8x1024x128") in found
    for length in (512, 1024, 2048):
        assert {("plain", f"1x8x{length}x{dim}") for dim in (40, 80, 96, 192, 256)} <= found
        assert {("gqa", f"1x8:2x{length}x64"), ("gqa", f"1x32:1x{length}x128")} <= found
        assert {("value_dim", f"1x8x{length}x64:96"), ("blhd", f"1x8x{length}x128")} <= found
        assert ("padding", f"4x8x{length}x64") in found  # ragged: lengths differ
    for keys in (4096, 16384, 65536):
        assert {("plain", f"1x32x1:{keys}x128"), ("gqa", f"1x32:8x1:{keys}x128")} <= found
    assert {("plain", "1x1x5x64"), *(("plain", f"64x8x{length}x64") for length in (16, 32, 64, 128))} <= found
    every, _ = cases_of(entries_of("bars"), None, ("float32", "bfloat16", "float16"))
    assert len(every) == 3 * len(cases)


def test_groups_tell_regimes_apart() -> None:
    assert only_case("plain", "1x2x512x64").group == "plain"
    assert only_case("plain", "1x2x512x40").group == "other head widths"
    assert only_case("plain", "1x2x1:4096x64").group == "decode"
    assert only_case("gqa", "1x8x1:4096x64").group == "decode, GQA"
    assert only_case("causal", "1x1x5x64").group == "tiny, causal"


def test_flops() -> None:
    dense, causal = only_case("plain", "1x2x8x16"), only_case("causal", "1x2x8x16")
    assert dense.flops("forward") == 4 * 2 * 64 * 16
    assert dense.flops("backward") == 10 * 2 * 64 * 16
    assert causal.attended == 2 * 36
    assert only_case("window", "1x1x8x16").attended == 1 + 7 * 2  # itself and one before


# -------------------------------------------------------------------------------------------------- correctness
@pytest.mark.parametrize("scale", [0.0, 1e-30, 0.7, 2.0, 900.0])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rule_is_that_of_the_tests(scale: float, gradient: bool, dtype: torch.dtype) -> None:
    oracle = torch.tensor([scale, -scale / 3], dtype=torch.float64)
    expected = tolerances.limit(oracle, dtype, 1e-4, gradient=gradient)
    assert rule.limit(1e-4, scale, dtype, gradient=gradient) == expected


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("sampled", [False, True])
def test_check_passes(feature: str, sampled: bool) -> None:
    case = only_case(feature, "3x4x40x16")
    one = run.make_work(case, CPU, "sdpa")
    if sampled:
        shape = one.sample.shape
        one.sample = Sample.of(shape, budget=2 * shape.heads // shape.kv_heads * 13 * shape.key_length)
        assert 0 < one.sample.share < 0.6
    verdict = rule.check(one)
    assert verdict.problems() == []
    assert {"output"} < set(verdict.findings)
    for finding in verdict.findings.values():
        assert math.isfinite(finding.peer)
        assert finding.peer < 0.2 * finding.scale, "the peer computes something else"


@pytest.mark.parametrize("feature", ["plain", "gqa", "mask_grad", "mha_weights"])
@pytest.mark.parametrize("wrong", ["query", "key", "value"])
def test_check_sees_a_wrong_gradient(feature: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(right: Callable[..., Any]) -> Callable[..., Any]:
        def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> Any:
            tensors = {"query": query, "key": key, "value": value}
            kept = tensors[wrong]
            tensors[wrong] = 1.1 * kept - 0.1 * kept.detach()  # the same values, a tenth too much gradient
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


def test_check_sees_non_finite_elements() -> None:
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
    ],
)
def test_the_peer_is_named(feature: str, label: str) -> None:
    assert run.make_work(only_case(feature), CPU, "sdpa").peer_label == label


def test_the_same_inputs_for_every_dtype_and_run() -> None:
    first, again = (work.AttentionWork(only_case("plain"), CPU).inputs["query"] for _ in range(2))
    assert torch.equal(first, again)
    wide = work.AttentionWork(only_case("plain", dtype="float32"), CPU).inputs["query"]
    assert torch.equal(first, wide.bfloat16())


# ------------------------------------------------------------------------------------------------------- timing
def test_sides_are_timed_in_turn() -> None:
    order = []
    timings = alternate((lambda: order.append("a"), lambda: order.append("b")), Effort(0.0, 3))
    text = "".join(order)
    calls = [timing.calls for timing in timings]
    turn = "a" * calls[0] + "b" * calls[1]
    assert text == "abab" + turn * 3  # a first call and a trial reading of each come before
    for timing in timings:
        assert len(timing.readings) == 3
        assert min(timing.readings) <= timing.median <= max(timing.readings)


def test_a_peer_that_needs_too_much_memory_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "free_memory", lambda device: 10_000)
    row = run.run_case(only_case("dropout"), CPU, ["forward"], Effort(0.0, 1), "sdpa", lambda part: None)
    assert row.verdict.passed
    assert row.peer_skipped is not None
    assert row.passes["forward"].peer is None
    assert row.passes["forward"].ratio is None


def test_numbers_are_short() -> None:
    assert [time_of(t) for t in (1.234e-7, 9.999e-6, 1.2345e-3, 0.0999, 2.5)] == [
        "0.12 us",
        "10.0 us",
        "1.23 ms",
        "99.9 ms",
        "2.50 s",
    ]
    assert [ratio_of(r) for r in (None, 0.5, 9.999, 833.8)] == ["-", "0.50x", "10.0x", "834x"]
    assert geomean([1.0, 4.0]) == pytest.approx(2.0)


# -------------------------------------------------------------------------------------------------- the command
def test_compare_in_a_process_of_its_own(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    options = ["--shapes", "1x2x24x16,1x2x1:200x16", "--dtype", "bfloat16", "--pass", "forward,backward,total"]
    command = [sys.executable, "-m", "scaledot", *TINY, *options, *files, "--threads", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "NO_COLOR": "1"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
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
        assert set(case["passes"]) == {"forward", "backward", "total"}
        for one in case["passes"].values():
            for side in ("scaledot", "torch"):
                times = one[side]
                assert len(times["readings"]) >= 5
                assert times["min"] <= times["median"] <= times["max"]
            assert one["ratio"] == pytest.approx(one["torch"]["median"] / one["scaledot"]["median"])
            assert one["kernel"] in scaledot.build_info()["cpu_kernels"]
    assert {"group", "dtype", "pass", "geomean", "smallest"} == set(report["summary"][0])


@pytest.mark.skipif(scaledot.cpu_capability() == "default", reason="needs AVX2")
def test_both_sides_at_avx2(tmp_path: Path) -> None:
    options = ["--shapes", "1x1x5x64", "--features", "plain", "--pass", "forward", "--json", str(tmp_path / "out.json")]
    env = {**os.environ, "SCALEDOT_CPU_CAPABILITY": "avx2", "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-m", "scaledot", *TINY, *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "instructions: scaledot avx2, torch AVX2" in ran.stdout
    cases = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert len(cases) == 3
    assert all(case["passes"]["forward"]["kernel"].startswith("avx2") for case in cases)


SMALL = [*TINY, "--shapes", "1x2x24x16", "--dtype", "bfloat16", "--features", "plain,causal"]


def test_a_wrong_case_is_shown_and_not_timed(
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


def test_an_exception_of_ours_is_a_wrong_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def attention(*tensors: torch.Tensor, **options: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(scaledot, "scaled_dot_product_attention", attention)
    assert main(SMALL) == 1
    assert "FAIL  RuntimeError: no such kernel" in capsys.readouterr().out


def test_an_interrupt_keeps_what_was_measured(
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
    assert "scaledot[compare]" in capsys.readouterr().err


def test_a_feature_that_does_not_apply_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    features = ["--features", "plain,causal,gqa"]
    assert main([*TINY, "--shapes", "1x1x1:20x16", "--dtype", "bfloat16", *features]) == 0
    out = capsys.readouterr().out
    assert "causal at 1x1x1:20x16: not run, needs as many queries as keys" in out
    assert "gqa at 1x1x1:20x16: not run, needs several heads" in out


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--dtype", "int8"], "'int8' is no dtype; known are float32"),
        (["--shapes", "huge"], "neither a set of shapes (quick, default"),
        (["--shapes", "1x8:3x5x64"], "8 query heads are not a multiple of 3 key heads"),
        (["--features", "plain,flash"], "'flash' is no feature; known are plain"),
        (["--pass", "sideways"], "'sideways' is no pass"),
        (["--device", "meta"], "runs on cpu and cuda"),
        (["--device", "quantum"], "'quantum' is no device"),
        (["--threads", "0"], "needs a positive integer"),
        (["--threads", "two"], "needs a positive integer"),
        (["--seconds", "-1"], "needs a positive number"),
        (["--json", "no/such/folder/x.json"], "the folder of 'no/such/folder/x.json' does not exist"),
        (["--plot", "x.gif"], "a plot is a .png, .svg or .pdf file"),
        (["--features", "gqa", "--shapes", "1x1x5x64"], "nothing to run: gqa at 1x1x5x64"),
    ],
)
def test_wrong_options(options: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert what in refused(["compare", *options], capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    assert "sees no CUDA device" in refused(["compare", "--device", "cuda"], capsys)


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "COMMAND" in refused([], capsys)


# --------------------------------------------------------------------------------------------- info and heatmap
def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for text in (scaledot.__version__, torch.__version__, scaledot.cpu_capability(), scaledot.cmake_prefix_path):
        assert text in out
    for kernel in scaledot.build_info()["cpu_kernels"]:
        assert kernel in out
    assert out.count("bfloat16") == 1


def test_heatmap_without_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["heatmap"]) == 0
    first = (tmp_path / "heatmap.png").read_bytes()
    assert picture_size(tmp_path / "heatmap.png")[0] > 1000
    assert "heatmap.png" in capsys.readouterr().out
    assert main(["heatmap"]) == 0
    assert (tmp_path / "heatmap.png").read_bytes() == first


@pytest.mark.parametrize(
    "options",
    [
        ["--text", "one two, two one", "--causal", "--heads", "2"],
        ["--tokens", "a", "b", "a", "--head", "1"],
        ["--text", "a b c d e", "--window", "1", "none"],
    ],
)
def test_heatmap_options(options: list[str], tmp_path: Path) -> None:
    assert main(["heatmap", *options, "--out", str(tmp_path / "map.png")]) == 0
    picture_size(tmp_path / "map.png")


@pytest.mark.parametrize("suffix", [".pt", ".npy"])
@pytest.mark.parametrize("options", [[], ["--tokens", "x", "y", "z"], ["--head", "1"]])
def test_heatmap_of_a_file(suffix: str, options: list[str], tmp_path: Path) -> None:
    weights, path = torch.rand(2, 3, 3).softmax(-1), tmp_path / f"weights{suffix}"
    if suffix == ".pt":
        torch.save(weights, path)
    else:
        import numpy

        numpy.save(path, weights.numpy())
    assert main(["heatmap", "--weights", str(path), *options, "--out", str(tmp_path / "map.png")]) == 0
    picture_size(tmp_path / "map.png")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--text", " "], "no token"),
        (["--heads", "3"], "needs a divisor of 64"),
        (["--head", "4"], "there are 4 heads, 0 to 3"),
        (["--window", "-1", "none"], "needs a number of positions, or none"),
        (["--weights", "missing.pt"], "there is no file 'missing.pt'"),
        (["--weights", "text.pt"], "is no file that torch.save wrote"),
        (["--weights", "list.pt"], "holds a list; needs one tensor"),
        (["--weights", "flat.pt"], "weights: got shape (3,)"),
        (["--weights", "good.pt", "--tokens", "a", "b"], "query_tokens: got 2 tokens; needs 3"),
        (["--weights", "good.pt", "--causal"], "are of the toy model"),
        (["--out", "map.txt"], "a plot is a .png, .svg or .pdf file"),
    ],
)
def test_heatmap_refuses(
    options: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.pt").write_text("no tensor")
    torch.save([1, 2], "list.pt")
    torch.save(torch.rand(3), "flat.pt")
    torch.save(torch.rand(3, 3), "good.pt")
    assert what in refused(["heatmap", *options], capsys)


def test_tokens() -> None:
    assert tokens_of("It's 5 o'clock, 我喜欢你。") == [
        *("It", "'", "s", "5", "o", "'", "clock", ","),
        *("我", "喜", "欢", "你", "。"),
    ]
