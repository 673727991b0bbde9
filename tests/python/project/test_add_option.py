"""An option is declared once, and so is a tensor argument: everything else follows from five changes.

tests/data/add_option.patch and add_tensor.patch make them. docs/extending.md, "To add an option" and "To add a tensor
argument", walks through the same changes.
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
PATCHES = {what: ROOT / "tests" / "data" / f"add_{what}.patch" for what in ("option", "tensor")}
SHOW_SCHEMAS = """
#include <iostream>

#include "ops/common/arguments.h"

int main() {
  using namespace scaledot;
  std::cout << option_schema<kSdpa>({}, Defaults::yes) << std::endl << option_schema<kVarlen>({}, Defaults::no);
  std::cout << std::endl << input_schema<SdpaInputs>(Defaults::yes) << std::endl << gradient_schema<SdpaInputs>();
}
"""
SHOW_SIGNATURES = """
import inspect
import scaledot
for name in ("scaled_dot_product_attention", "explain", "varlen_attention", "explain_varlen"):
    parameters = inspect.signature(getattr(scaledot, name)).parameters
    print(parameters["score_shift"].default, parameters["key_bias"].default if "key_bias" in parameters else "without")
"""


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the C++ source and of the installed package, with the patches applied."""
    copy = tmp_path_factory.mktemp("patched")
    shutil.copytree(ROOT / "csrc", copy / "csrc")
    package = Path(scaledot.__file__).parent
    shutil.copytree(package, copy / "python" / "scaledot", ignore=shutil.ignore_patterns("__pycache__", "include"))
    for patch in PATCHES.values():
        subprocess.run(["git", "apply", "--verbose", str(patch)], cwd=copy, check=True)
    return copy


def compile_(patched: Path, *arguments: object) -> None:
    folder = Path(torch.__file__).parent
    includes = ["-I", patched / "csrc", "-isystem", folder / "include"]
    libraries = ["-L", folder / "lib", f"-Wl,-rpath,{folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(["c++", "-std=c++20", *map(str, [*includes, *arguments, *libraries])], check=True)


@pytest.mark.parametrize("what", PATCHES)
def test_an_addition_is_five_places_in_five_files(what: str) -> None:
    places: dict[str, int] = {}
    file, previous = "", ""
    for line in PATCHES[what].read_text().splitlines():
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
    sdpa, varlen, inputs, gradients = shown.splitlines()
    assert "float score_shift=0.0" in sdpa
    assert "float score_shift" in varlen
    assert "Tensor? key_bias=None" in inputs
    assert "key_bias" not in gradients  # it is no Differentiable::yes


@pytest.mark.parametrize("file", ["common/problem_builder.cpp", "sdpa/nodes.cpp"])
def test_the_problem_and_the_nodes_follow(patched: Path, file: str) -> None:
    compile_(patched, "-fsyntax-only", patched / "csrc" / "ops" / file)


def test_the_python_functions_have_them(patched: Path) -> None:
    environment = {"PYTHONPATH": str(patched / "python"), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", SHOW_SIGNATURES]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=patched).stdout
    assert shown.splitlines() == ["0.0 None"] * 2 + ["0.0 without"] * 2
