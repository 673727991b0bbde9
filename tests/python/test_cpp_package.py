"""The C++ package: tests/cpp_package is configured, built and run against the installed scaledot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import scaledot

SOURCES = Path(__file__).resolve().parent.parent / "cpp_package"
BUILD_SECONDS = 900  # a minute on two idle cores


def _program(name: str) -> str | None:
    """An executable beside this Python (where pip puts it) or on the PATH."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def _run(command: list[str], timeout: float, environment: Mapping[str, str] | None = None) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    output = result.stdout + result.stderr
    assert result.returncode == 0, f"{' '.join(command)} ended with {result.returncode}:\n{output}"
    return output


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cmake, ninja = _program("cmake"), _program("ninja")
    assert cmake is not None, "needs cmake: pip install cmake"
    build = tmp_path_factory.mktemp("cpp package")  # with a space in its name
    prefixes = [scaledot.cmake_prefix_path, torch.utils.cmake_prefix_path]
    configure = [cmake, "-S", str(SOURCES), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"]
    configure.append(f"-DCMAKE_PREFIX_PATH={';'.join(prefixes)}")
    if ninja is not None:
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    _run(configure, BUILD_SECONDS)
    _run([cmake, "--build", str(build)], BUILD_SECONDS)
    return build / "attention"


@pytest.fixture(scope="module")
def layer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python layer's parameters, an input and the layer's results; main.cpp has the same options."""
    torch.manual_seed(5)
    layer = scaledot.MultiHeadAttention(
        24, 4, kdim=10, vdim=12, out_dim=7, qk_dim=32, v_dim=20, num_kv_heads=2, dtype=torch.float64
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()  # biases too
    inputs = {
        "query": torch.randn(2, 6, 24, dtype=torch.float64),
        "key": torch.randn(2, 9, 10, dtype=torch.float64),
        "value": torch.randn(2, 9, 12, dtype=torch.float64),
        "attn_mask": torch.randn(4, 6, 9, dtype=torch.float64),
        "key_mask": torch.arange(9).expand(2, 9) < torch.tensor([[9], [5]]),
    }
    with torch.no_grad():
        output, weights = layer(**inputs, window=(None, 3), need_weights=True)
    state = layer.state_dict()
    path = tmp_path_factory.mktemp("layer") / "layer.pt"
    torch.save(
        {
            **{f"layer.{name}": tensor for name, tensor in state.items()},
            **{name: tensor.contiguous() for name, tensor in inputs.items()},
            "parameters": torch.tensor(len(state)),
            "output": output.contiguous(),
            "weights": weights,
        },
        path,
    )
    return path


def test_program_runs(program: Path, layer_file: Path) -> None:
    assert "all is well" in _run([str(program), str(layer_file)], 120)


def test_program_runs_on_baseline_kernels(program: Path, layer_file: Path) -> None:
    environment = {**os.environ, "SCALEDOT_CPU_CAPABILITY": "default"}
    assert "all is well" in _run([str(program), str(layer_file)], 120, environment)
