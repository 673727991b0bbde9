"""python -m scaledot: --version, info and heatmap. The compare command has its own files."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import scaledot
from command_line import TINY, picture_size, refused
from scaledot import fonts
from scaledot.__main__ import main, tokens_of

pytest.importorskip("matplotlib")


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    for name in ("compare", "info", "heatmap"):
        assert f"\n    {name} " in said
    assert said.endswith("error: COMMAND: got none; needs one of compare, info, heatmap\n")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["compare", "--quik"], "compare: error: got '--quik', which is no option: did you mean --quick?"),
        (["compare", "--dtypes=fp16"], "got '--dtypes', which is no option: did you mean --dtype?"),
        (["compare", "--shape", "tiny"], "got '--shape', which is no option: did you mean --shapes?"),
        (["heatmap", "--win", "3", "0"], "got '--win', which is no option: did you mean --window?"),
        (["--vers"], "got '--vers', which is no option: did you mean --version?"),
        (["compare", "quick"], "compare: error: got 'quick', which is no option: did you mean --quick?"),
        (["info", "--jsn"], "info: error: got '--jsn', which is no option: did you mean --json?"),
        (["info", "--xyz"], "which is no option: `python -m scaledot info --help` lists the options"),
    ],
)
def test_an_unknown_option_names_the_one_that_is_meant(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert what in refused(arguments, capsys)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["comparee"], "argument COMMAND: got 'comparee'; needs one of compare, info, heatmap: did you mean compare?"),
        (["xyz"], "argument COMMAND: got 'xyz'; needs one of compare, info, heatmap"),
        (["compare", "--peer", "eagr"], "--peer: got 'eagr'; needs one of sdpa, eager: did you mean eager?"),
        (["compare", "--features", "plan"], ": did you mean plain?"),
        (["compare", "--shapes", "qick"], ": did you mean quick?"),
    ],
)
def test_a_mistyped_name_gets_a_hint(arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(arguments, capsys).endswith(what)


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("arguments", ["info", "--help", "compare --help", "info --help", "heatmap --help"])
def test_lines_fit_the_terminal(
    arguments: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for long words, such as -DCMAKE_PREFIX_PATH=/a/path, which could not be copied; and argparse's own usage."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with contextlib.suppress(SystemExit):
        main(arguments.split())
    out = capsys.readouterr().out
    lines = (out.partition("\n\n")[2] if "--help" in arguments else out).splitlines()
    assert len(lines) > 3
    for line in lines:
        assert len(line) <= columns or max(map(len, line.split())) > columns // 2, line


def test_info_quotes_a_folder_with_a_space(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaledot, "cmake_prefix_path", "/a folder/scaledot")
    assert main(["info"]) == 0
    assert "-DCMAKE_PREFIX_PATH='/a folder/scaledot'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "codes"),
    [
        ("compare --help", ("0", "141")),  # argparse ignores the error, in some versions of Python
        ("info", ("141",)),
        (f"{' '.join(TINY)} --shapes 1x1x4x8 --features plain", ("141",)),
    ],
)
def test_a_reader_that_ends_first(arguments: str, codes: tuple[str, ...]) -> None:
    command = f"{sys.executable} -m scaledot {arguments}; echo code $? >&2"
    piped = f"({command}) | head -n 0"
    ran = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, timeout=300)
    lines = [line for line in ran.stderr.splitlines() if "tqdm" not in line]
    assert lines in [[f"code {code}"] for code in codes]


# ------------------------------------------------------------------------------------------- version and info
def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for text in (scaledot.__version__, torch.__version__, scaledot.cpu_capability(), scaledot.cmake_prefix_path):
        assert text in out
    build = scaledot.build_info()
    for kernel in build["cpu_kernels"]:
        assert kernel in out
    assert f"ops           for torch {build['torch']}; there are ops for {', '.join(build['torch_minors'])}" in out
    assert out.count("bfloat16") == 1


def test_info_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["build"] == json.loads(json.dumps(scaledot.build_info()))
    assert found["scaledot"] == str(Path(scaledot.__file__).parent)
    assert found["cmake_prefix_path"] == scaledot.cmake_prefix_path
    assert found["machine"]["torch"] == torch.__version__
    assert found["machine"]["capability"] == scaledot.cpu_capability()
    assert list(found["kernels"]) == ["float32", "bfloat16", "float16", "float64"]
    for kernels in found["kernels"].values():
        assert list(kernels) == ["forward", "backward", "decode"]
        assert set(kernels.values()) <= set(scaledot.build_info()["cpu_kernels"])


@pytest.mark.parametrize("program", ["scaledot", "__main__.py"])
def test_version(program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"/some/where/{program}", "--version"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"scaledot {scaledot.__version__}\n"


@pytest.mark.parametrize(("program", "usage"), [("scaledot", "scaledot"), ("__main__.py", "python -m scaledot")])
def test_usage_names_the_program(
    program: str, usage: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [f"/some/where/{program}"])
    assert refused([], capsys).startswith(f"{usage}: error:")


def test_version_in_a_subprocess() -> None:
    command = [sys.executable, "-m", "scaledot", "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout == f"scaledot {scaledot.__version__}\n"


# ------------------------------------------------------------------------------------------- heatmap
def test_heatmap_without_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["heatmap"]) == 0
    first = (tmp_path / "heatmap.png").read_bytes()
    assert picture_size(tmp_path / "heatmap.png")[0] > 1000
    assert "heatmap.png" in capsys.readouterr().out
    assert "got none, but heatmap.png exists; needs a name" in refused(["heatmap", "--head", "0"], capsys)
    assert (tmp_path / "heatmap.png").read_bytes() == first
    assert main(["heatmap", "--out", "heatmap.png"]) == 0
    assert (tmp_path / "heatmap.png").read_bytes() == first


def test_heatmap_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "--out: got 'heatmap.png'; needs matplotlib: run `pip install matplotlib`" in refused(["heatmap"], capsys)


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


def test_heatmap_warns_once_of_missing_glyphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "_fallbacks", list)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert main(["heatmap", "--tokens", "我", "喜欢", "--out", str(tmp_path / "map.png")]) == 0
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 1, messages
    assert "no installed font has 3 of the characters" in messages[0]


@pytest.mark.parametrize("suffix", [".pt", ".npy"])
@pytest.mark.parametrize("options", [[], ["--tokens", "x", "y", "z"], ["--head", "1"]])
def test_heatmap_of_saved_weights(suffix: str, options: list[str], tmp_path: Path) -> None:
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
        (["--text", " "], "--text: got ' '; needs at least one token"),
        (["--heads", "3"], "needs a divisor of 64"),
        (["--head", "4"], "--head: got 4; needs 0 to 3"),
        (["--head", "first"], "got 'first'; needs an integer, at least 0"),
        (["--window", "-1", "none"], "needs a number of positions, or none"),
        (["--weights", "missing.pt"], "got 'missing.pt'; needs a file that exists"),
        (["--weights", "text.pt"], "got 'text.pt'; needs a file written by torch.save"),
        (["--weights", "list.pt"], "got a list in 'list.pt'; needs one tensor"),
        (["--weights", "flat.pt"], "weights: got shape (3,)"),
        (["--weights", "good.pt", "--tokens", "a", "b"], "query_tokens: got 2 tokens; needs 3"),
        (["--weights", "good.pt", "--causal"], "needs none, as they are of the toy model"),
        (["--out", "map.txt"], "got 'map.txt'; needs a .png, .svg or .pdf file"),
    ],
)
def test_heatmap_errors(
    options: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.pt").write_text("no tensor")
    torch.save([1, 2], "list.pt")
    torch.save(torch.rand(3), "flat.pt")
    torch.save(torch.rand(3, 3), "good.pt")
    Path("heatmap.png").write_text("an earlier picture, which hides no error")
    assert what in refused(["heatmap", *options], capsys)


def test_splitting_a_text_into_tokens() -> None:
    assert tokens_of("It's 5 o'clock, 我喜欢你。") == [
        *("It", "'", "s", "5", "o", "'", "clock", ","),
        *("我", "喜", "欢", "你", "。"),
    ]
