"""The scripts of this repository, without running what they do."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from snippets import ROOT

FOLDERS = (".ci", "docs", "tests")
FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file() and not path.suffix]
SCRIPTS = [path for path in FILES if path.read_bytes().startswith(b"#!/usr/bin/env bash\n")]


def test_the_scripts_are_found() -> None:
    assert {"run", "lint", "build", "wheel", "sanitize"} <= {path.name for path in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_help_comes_before_anything_else(script: Path, tmp_path: Path) -> None:
    """With a PATH that has nothing to install or build with, and Python without pip."""
    for name in ("bash", "dirname", "sed"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(
        [str(tmp_path / "bash"), str(script), "--help"],
        capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) >= 1
    assert not ran.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bash", "dirname", "python3", "sed"]


def test_no_program_takes_abbreviated_options() -> None:
    """An abbreviation would change its meaning with the next option that begins like it."""
    programs = [path for path in FILES if path.read_bytes().startswith(b"#!/usr/bin/env python3\n")]
    programs += [path for folder in ("examples", "python", "tests") for path in (ROOT / folder).rglob("*.py")]
    parsers = 0
    for path in programs:
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "argparse.ArgumentParser":
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                assert given.get("allow_abbrev") == "False", f"{path}:{call.lineno}"
                parsers += 1
    assert parsers >= 30


@pytest.mark.parametrize("there", [True, False])
def test_missing_headers_of_python_are_named(there: bool, tmp_path: Path) -> None:
    """With a PATH that has nothing to install them with."""
    folder = tmp_path / "include"
    python = tmp_path / "python"
    python.write_text(f"#!{shutil.which('bash')}\necho {folder}\n")
    python.chmod(0o755)
    if there:
        folder.mkdir()
        (folder / "Python.h").touch()
    command = [str(shutil.which("bash")), "-c", f"source '{ROOT}/tests/prerequisites.sh'; need_python_headers"]
    ran = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tmp_path)}, timeout=60, check=False)
    assert ran.returncode == (0 if there else 1)
    assert there or f"found no {folder}/Python.h; on Debian and Ubuntu run: apt-get install python3-dev" in ran.stderr
