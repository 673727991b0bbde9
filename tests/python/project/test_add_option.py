"""An option is declared once: tests/data/add_option.patch adds one, and everything else follows from its five changes.

csrc/README.md, "To add an option", walks through the same changes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import scaledot

ROOT = Path(__file__).resolve().parents[3]
PATCH = ROOT / "tests" / "data" / "add_option.patch"
SHOW_SCHEMAS = """
#include <iostream>

#include "ops/common/op.h"

int main() {
  using namespace scaledot;
  std::cout << option_schema<kSdpa>({}, Defaults::yes) << std::endl << option_schema<kVarlen>({}, Defaults::no);
}
"""
SHOW_SIGNATURES = """
import inspect
import scaledot
for name in ("scaled_dot_product_attention", "explain", "varlen_attention", "explain_varlen"):
    print(inspect.signature(getattr(scaledot, name)).parameters["score_shift"].default)
"""


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the C++ source and of the installed package, with the patch applied."""
    copy = tmp_path_factory.mktemp("patched")
    shutil.copytree(ROOT / "csrc", copy / "csrc")
    package = Path(scaledot.__file__).parent
    shutil.copytree(package, copy / "python" / "scaledot", ignore=shutil.ignore_patterns("__pycache__", "include"))
    subprocess.run(["git", "apply", "--verbose", str(PATCH)], cwd=copy, check=True)
    return copy


def compile_(patched: Path, *arguments: object) -> None:
    folder = Path(torch.__file__).parent
    includes = ["-I", patched / "csrc", "-isystem", folder / "include"]
    libraries = ["-L", folder / "lib", f"-Wl,-rpath,{folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(["c++", "-std=c++20", *map(str, [*includes, *arguments, *libraries])], check=True)


def test_an_option_is_five_places_in_five_files() -> None:
    places: dict[str, int] = {}
    file, previous = "", ""
    for line in PATCH.read_text().splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ b/")
        elif line.startswith("+") and not previous.startswith("+"):
            places[file] = places.get(file, 0) + 1
        previous = line
    cpp = {file: count for file, count in places.items() if file.startswith("csrc/")}
    assert len(places) <= 5
    assert sum(cpp.values()) <= 4
    assert sum(places.values()) - sum(cpp.values()) <= 3


def test_the_schemas_follow(patched: Path) -> None:
    (patched / "show.cpp").write_text(SHOW_SCHEMAS)
    compile_(patched, patched / "show.cpp", "-o", patched / "show")
    shown = subprocess.run([str(patched / "show")], check=True, capture_output=True, text=True).stdout
    sdpa, varlen = shown.splitlines()
    assert "float score_shift=0.0" in sdpa
    assert "float score_shift" in varlen


def test_the_problem_is_filled(patched: Path) -> None:
    compile_(patched, "-fsyntax-only", patched / "csrc" / "ops" / "common" / "problem_builder.cpp")


def test_the_python_functions_have_it(patched: Path) -> None:
    environment = {"PYTHONPATH": str(patched / "python"), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", SHOW_SIGNATURES]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=patched).stdout
    assert shown.split() == ["0.0"] * 4
