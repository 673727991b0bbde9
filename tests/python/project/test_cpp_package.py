"""The C++ package: tests/cpp_package and examples/cpp are built against the installed scaledot, and run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import scaledot
from cpp_build import BUILD_SECONDS, configure, run
from cpp_build import program as program_path
from exported import Layer, packaged
from snippets import fences


@pytest.fixture(scope="module")
def layer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a Python layer's parameters, an input and the results; main.cpp sets the same options."""
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
    rows = torch.randn(1, 2, 40, 8, dtype=torch.float64)
    torch.manual_seed(7)
    dropped = scaledot.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.5, return_weights=True)[1]
    state = layer.state_dict()
    path = tmp_path_factory.mktemp("layer") / "layer.pt"
    torch.save(
        {
            **{f"layer.{name}": tensor for name, tensor in state.items()},
            **{name: tensor.contiguous() for name, tensor in inputs.items()},
            "parameters": torch.tensor(len(state)),
            "output": output.contiguous(),
            "weights": weights,
            "rows": rows,
            "dropped": dropped,
        },
        path,
    )
    return path


def test_program_runs(cpp_build: Path, layer_file: Path) -> None:
    assert "all is well" in run([str(cpp_build / "attention"), str(layer_file)], 120)


def test_program_runs_on_baseline_kernels(cpp_build: Path, layer_file: Path) -> None:
    environment = {**os.environ, "SCALEDOT_CPU_CAPABILITY": "default"}
    assert "all is well" in run([str(cpp_build / "attention"), str(layer_file)], 120, environment)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("SCALEDOT_CPU_CAPABILITY", "DEFAULT", "is not one of default"),
        ("SCALEDOT_SAVE_FOR_BACKWARD", "off", "is not one of 0, 1: using 1."),
        ("SCALEDOT_KEEP_WEIGHTS", "off", "is not one of 0, 1: using 1."),
        ("SCALEDOT_SAVE_FOR_BACKWARD", "0", None),
    ],
)
def test_a_program_warns_once_of_an_environment_variable(
    cpp_build: Path, name: str, value: str, problem: str | None
) -> None:
    """Without Python, which gives the same warnings at import: test_build.py."""
    printed = run([str(cpp_build / "example" / "decode")], 120, {**os.environ, name: value})
    assert printed.count(f"{name}={value}") == (problem is not None)
    assert f"{name}={value} {problem}" in printed or problem is None


def test_example_runs(cpp_build: Path) -> None:
    output = run([str(cpp_build / "example" / "decode")], 120)
    assert "24 tokens decoded, requires_grad: false" in output
    assert float(output.split("largest difference from one causal pass: ")[1]) < 1e-5


def test_the_programs_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/guides/cpp.md, to the letter: its CMakeLists.txt with its first and last program; the others beside them."""
    blocks = {kind: [f.text for f in fences(kind) if f.page.name == "cpp.md"] for kind in ("cmake", "cpp", "text")}
    sources = ("main.cpp", "block_mask.cpp", "layer.cpp", "packaged.cpp")
    for name, text in zip(sources, blocks["cpp"], strict=True):
        (tmp_path / name).write_text(text)
    lines = "".join(blocks["cmake"])
    for name in ("block_mask", "layer"):
        lines += f"add_executable({name} {name}.cpp)\ntarget_link_libraries({name} PRIVATE scaledot::scaledot)\n"
    (tmp_path / "CMakeLists.txt").write_text(lines)
    configure(tmp_path, tmp_path / "build", torch.utils.cmake_prefix_path)
    run([program_path("cmake"), "--build", str(tmp_path / "build")], BUILD_SECONDS)
    monkeypatch.chdir(tmp_path)
    packaged(Layer().eval(), "layer.pt2")
    said = [run([f"build/{name}"], 120) for name in ("attention", "block_mask", "layer", "packaged")]
    assert [said[0], said[3]] == blocks["text"]
    assert said[1] == "gradient of bias [3, 9]\n"
    losses = [float(line.split()[-1]) for line in said[2].splitlines()]
    assert losses[1] < losses[0]


def test_a_cuda_torch_is_linked_by_path_where_the_toolkit_lacks_libraries(tmp_path: Path) -> None:
    """find_package(Torch) would stop there. Packages of nvcc bring the CUDA runtime, but no cuBLAS."""
    minor = ".".join(torch.__version__.split(".")[:2])
    files = {
        "torch/version.py": f"__version__ = '{minor}.0+cu130'\n",
        "torch/share/cmake/Torch/TorchConfig.cmake": 'message(FATAL_ERROR "where is CUDA?")\n',
        **{f"torch/lib/lib{name}.so": "" for name in ("torch", "torch_cpu", "torch_cuda", "c10")},
        "cuda/bin/nvcc": "#!/bin/sh\n",
        "cuda/version.json": '{"cuda": {"version": "13.0.0"}}\n',
        "cuda/include/cuda_runtime.h": "",
        "cuda/lib64/libcudart.so": "",
        "CMakeLists.txt": """cmake_minimum_required(VERSION 3.26)
            project(user LANGUAGES CXX)
            find_package(CUDAToolkit QUIET)
            find_package(scaledot REQUIRED)
            get_target_property(linked scaledot::scaledot INTERFACE_LINK_LIBRARIES)
            message(STATUS "toolkit: ${CUDAToolkit_FOUND}, linked: ${linked}")""",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "cuda" / "bin" / "nvcc").chmod(0o755)
    cuda = f"-DCUDAToolkit_ROOT={tmp_path / 'cuda'}"
    output = configure(tmp_path, tmp_path / "build", str(tmp_path / "torch"), cuda)
    linked = ";".join(str(tmp_path / "torch" / "lib" / f"lib{name}.so") for name in ("torch", "torch_cpu", "c10"))
    assert f"toolkit: TRUE, linked: {linked}\n" in output
