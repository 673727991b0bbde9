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


def _program(name: str) -> str | None:
    """The path of an executable: next to this Python, where pip installs it, or on PATH."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def run(command: list[str], timeout: float, environment: Mapping[str, str] | None = None) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    output = result.stdout + result.stderr
    assert result.returncode == 0, f"{' '.join(command)} ended with {result.returncode}:\n{output}"
    return output


def build(folder: Path) -> Path:
    """Configures and builds in `folder`, and returns it. It then holds the programs."""
    cmake, ninja = _program("cmake"), _program("ninja")
    assert cmake is not None, "cmake was not found: pip install cmake"
    prefixes = [scaledot.cmake_prefix_path, torch.utils.cmake_prefix_path]
    configure = [cmake, "-S", str(SOURCES), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release"]
    configure.append(f"-DCMAKE_PREFIX_PATH={';'.join(prefixes)}")
    if ninja is not None:
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    run(configure, BUILD_SECONDS)
    run([cmake, "--build", str(folder)], BUILD_SECONDS)
    return folder
