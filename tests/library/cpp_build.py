"""Builds tests/cpp_package against the installed scaledot."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

import scaledot

SOURCES = Path(__file__).resolve().parents[1] / "cpp_package"
BUILD_SECONDS = 900  # a minute on two idle cores


def program(name: str) -> str:
    """The path of an executable: next to this Python, where pip installs it, or on PATH."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert found is not None, f"{name} was not found: pip install {name}"
    return found


def run(command: list[str], timeout: float, environment: Mapping[str, str] | None = None) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    output = result.stdout + result.stderr
    assert result.returncode == 0, f"{' '.join(command)} ended with {result.returncode}:\n{output}"
    return output


def configure(sources: Path, folder: Path, torch_prefix: str, *definitions: str) -> str:
    """Runs CMake for a project that finds the installed scaledot, and torch in `torch_prefix`. Returns its output."""
    command = [program("cmake"), "-S", str(sources), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release"]
    command += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={program('ninja')}"]
    command.append(f"-DCMAKE_PREFIX_PATH={scaledot.cmake_prefix_path};{torch_prefix}")
    return run([*command, *definitions], BUILD_SECONDS)


def build(folder: Path) -> Path:
    """Configures and builds in `folder`, and returns it. It then holds the programs."""
    configure(SOURCES, folder, torch.utils.cmake_prefix_path)
    run([program("cmake"), "--build", str(folder)], BUILD_SECONDS)
    return folder
