"""tests/torch_versions, tried with a Python that only pretends to install and test."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests" / "torch_versions"

# Makes environments whose Python is itself. torch 2.12 cannot be installed there, and a test fails under torch 2.13.
PRETENDED = """#!{python}
import os, sys, pathlib
words = sys.argv[1:]
here = pathlib.Path(sys.argv[0]).parent
with open({log!r}, "a") as log:
    print(*words, "| PYTHONPATH" if "PYTHONPATH" in os.environ else "", file=log)
if words[:2] == ["-m", "venv"]:
    folder = pathlib.Path(words[2])
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").touch()
    (folder / "bin" / "python").write_text(pathlib.Path(sys.argv[0]).read_text())
    (folder / "bin" / "python").chmod(0o755)
elif words[:3] == ["-m", "pip", "install"]:
    if words[3:] == ["torch==2.12.*"]:
        raise SystemExit(7)
    (here / "torch").write_text(words[-1].removeprefix("torch==").replace("*", "1"))
elif words[0] == "-c":
    print((here / "torch").read_text(), "3.12.1")
elif words[:2] == ["-m", "pytest"]:
    failed = int("2.13" in (here / "torch").read_text())
    report = next(word for word in words if word.startswith("--junitxml=")).removeprefix("--junitxml=")
    pathlib.Path(report).write_text(
        '<testsuites><testsuite tests="60" failures="%d" errors="0" skipped="8"/></testsuites>' % failed
    )
    raise SystemExit(failed)
"""
PAGE = """# Compatibility
before
<!-- torch versions: begin -->
| torch | Python | passed | skipped | failed | minutes | date |
| --- | --- | --- | --- | --- | --- | --- |
| 2.9.0 | 3.11.7 | 1 | 2 | 0 | 3 | 2026-01-01 |
| 2.11.0 | 3.11.7 | 1 | 2 | 0 | 3 | 2026-01-01 |
<!-- torch versions: end -->
after
"""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tests/torch_versions as a module."""
    loader = SourceFileLoader("torch_versions", str(PROGRAM))
    spec = importlib.util.spec_from_loader("torch_versions", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "torch_versions", module)  # dataclasses look there
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    return module


@pytest.fixture
def versions(program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, with another page to write to, where torch 2.11 to 2.13 are supported."""
    monkeypatch.setattr(program.torch_folder, "TRIED", [(2, 11), (2, 12), (2, 13)])
    monkeypatch.setattr(program, "PAGE", tmp_path / "compatibility.md")
    program.PAGE.write_text(PAGE)
    return program


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    python = tmp_path / "python"
    python.write_text(PRETENDED.format(python=sys.executable, log=str(tmp_path / "log")))
    python.chmod(0o755)
    return ["--python", str(python), "--folder", str(tmp_path / "environments")]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")]


def rows_of(page: Path) -> dict[str, list[str]]:
    text = page.read_text().split("<!-- torch versions: begin -->\n")[1].split("<!-- torch versions: end -->")[0]
    return {row[0]: row for row in map(cells, text.strip().splitlines()[2:])}


def test_the_minor_versions_are_those_of_pyproject(versions: ModuleType) -> None:
    assert versions.supported_minors() == ["2.11", "2.12", "2.13"]
    assert versions.parse([]).minors == ["2.11", "2.12", "2.13"]


def test_one_version(versions: ModuleType, options: list[str], tmp_path: Path) -> None:
    assert versions.main([*options, "2.11", "--write"]) == 0
    ran = (tmp_path / "log").read_text().splitlines()
    folder = tmp_path / "environments" / "2.11"
    assert ran[0].startswith(f"-m venv {folder}")
    assert ran[1].split() == ["-m", "pip", "install", "torch==2.11.*"]
    assert ran[2].split() == ["-m", "pip", "install", ".[test]", "torch==2.11.*"]
    assert ran[-1].split() == ["-m", "pytest", "-n", "auto", "--dist", "loadfile", f"--junitxml={folder}.xml"]
    assert not any("PYTHONPATH" in line for line in ran)
    assert not folder.exists()
    rows = rows_of(versions.PAGE)
    assert list(rows) == ["2.9.0", "2.11.1"]  # the other line stays, this one replaces that of 2.11.0
    assert rows["2.11.1"][:6] == ["2.11.1", "3.12.1", "52", "8", "0", "0"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", rows["2.11.1"][6])
    text = versions.PAGE.read_text()
    assert text.startswith("# Compatibility\nbefore\n")
    assert text.endswith("\nafter\n")


def test_failures_do_not_stop_the_other_versions(
    versions: ModuleType, options: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert versions.main([*options, "2.12", "2.13", "2.11"]) == 1
    printed = capfd.readouterr()
    table = [cells(line)[:5] for line in printed.out.splitlines() if line.startswith("| 2.")]
    assert table == [["2.11.1", "3.12.1", "52", "8", "0"], ["2.13.1", "3.12.1", "51", "8", "1"]]
    folder = tmp_path / "environments"
    assert printed.err.splitlines() == [
        "FAILED: torch 2.12: torch ended with status 7",
        f"FAILED: torch 2.13: tests failed: 1; see {folder / '2.13.xml'}",
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["2.11.xml", "2.13.xml"]
    assert versions.PAGE.read_text() == PAGE  # without --write


def test_kept_environment_a_wheel_and_further_arguments(
    versions: ModuleType, options: list[str], tmp_path: Path
) -> None:
    wheel = tmp_path / "scaledot-1-py3-none-any.whl"
    wheel.touch()
    assert versions.main([*options, "2.11", "--keep", "--wheel", str(wheel), "--", "-k", "masks"]) == 0
    assert (tmp_path / "environments" / "2.11" / "bin" / "python").exists()
    ran = (tmp_path / "log").read_text().splitlines()
    assert ran[2].split() == ["-m", "pip", "install", f"{wheel}[test]", "torch==2.11.*"]
    assert ran[-1].split()[-2:] == ["-k", "masks"]


def test_pytest_that_ends_without_a_report(
    versions: ModuleType, options: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text(python.read_text().replace("pathlib.Path(report).write_text(", "raise SystemExit(4)\n    print("))
    assert versions.main([*options, "2.11", "--write"]) == 1
    assert capfd.readouterr().err == "FAILED: torch 2.11: tests ended with status 4\n"
    assert versions.PAGE.read_text() == PAGE


def test_no_folder_but_an_environment_is_replaced(
    versions: ModuleType, options: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    precious = tmp_path / "environments" / "2.11" / "precious"
    precious.parent.mkdir(parents=True)
    precious.touch()
    assert versions.main([*options, "2.11"]) == 1
    assert "2.11, which has content; needs a virtual environment" in capfd.readouterr().err
    assert precious.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["2.14"], "minor: got 2.14; needs one of 2.11, 2.12, 2.13"),
        (["--wheel", "no.whl"], "--wheel: got no.whl, which is no file; needs a wheel of scaledot"),
        (["--write", "--", "-x"], "--write: got further arguments of pytest (-x); needs a run of all tests"),
    ],
)
def test_bad_arguments(
    versions: ModuleType, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        versions.parse(words)
    assert stop.value.code == 2
    assert capsys.readouterr().err.strip().endswith(message)


def test_a_page_without_its_table(versions: ModuleType) -> None:
    with pytest.raises(SystemExit, match="needs one line `<!-- torch versions: begin -->`"):
        versions.with_rows("# Compatibility\n", [])


def test_the_program_can_be_run() -> None:
    assert os.access(PROGRAM, os.X_OK)


def test_lines_of_the_page_are_of_supported_versions_without_failures(program: ModuleType) -> None:
    rows = rows_of(program.PAGE)
    minors = [".".join(torch.split(".")[:2]) for torch in rows]
    assert minors == [minor for minor in program.supported_minors() if minor in minors]
    assert all(row[4] == "0" for row in rows.values())
