"""The kernel for the Hugging Face hub: the kernels package loads it from a folder, beside the installed scaledot."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from snippets import ROOT

BUILD_SECONDS = 1800  # a minute on two idle cores

PROGRAM = """
import sys
from pathlib import Path
import torch
from kernels import get_local_kernel
import scaledot
from scaledot.dropin.flash_attn import flash_attn_func, flash_attn_varlen_func

kernel = get_local_kernel(Path(sys.argv[1]))
assert kernel.__version__ == scaledot.__version__
assert kernel.scaled_dot_product_attention is not scaledot.scaled_dot_product_attention

def same(function, *arguments, **options):
    ours, theirs = (getattr(module, function.__name__)(*arguments, **options) for module in (owner, kernel))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

torch.manual_seed(0)
query, key, value = torch.randn(3, 2, 4, 30, 16).unbind()
owner = scaledot
same(scaledot.scaled_dot_product_attention, query, key, value, is_causal=True, softcap=5.0)
inputs = [x.transpose(1, 2).requires_grad_() for x in (query, key, value)]
owner = scaledot.dropin.flash_attn
same(flash_attn_func, *inputs, causal=True, window_size=(7, 0))
rows = [x.reshape(60, 4, 16) for x in inputs]
ends = torch.tensor([0, 11, 60], dtype=torch.int32)
same(flash_attn_varlen_func, *rows, ends, ends, 49, 49)
gradients = [torch.autograd.grad(f(*inputs).sin().sum(), inputs) for f in (flash_attn_func, kernel.flash_attn_func)]
torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
spaces = {str(module.functional._sdpa).split(".")[0] for module in (scaledot, kernel.scaledot)}
assert len(spaces) == 2 and "scaledot" in spaces, spaces
try:
    kernel.scaled_dot_product_attention(query, key, value, is_causal="yes")
except TypeError as error:
    assert "is_causal" in str(error), error
else:
    raise AssertionError("a wrong type was accepted")
"""


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=BUILD_SECONDS, check=False)


def make(folder: Path, build: Path) -> subprocess.CompletedProcess[str]:
    # A build type without flags: optimisation and debug information each take most of the time of a compiler.
    command = [sys.executable, "-m", "scaledot_build.hub_kernel", str(folder)]
    return run(command, SCALEDOT_BUILD_DIR=str(build), SCALEDOT_TORCH_DIRS="", CMAKE_BUILD_TYPE="None")


def test_kernel_is_made_and_loaded_beside_scaledot(tmp_path: Path) -> None:
    made = make(tmp_path / "kernel", tmp_path / "build")
    assert made.returncode == 0, made.stdout + made.stderr
    (variant,) = (tmp_path / "kernel" / "build").iterdir()
    minor = "".join(torch.__version__.split(".")[:2])
    assert variant.name == f"torch{minor}-cxx11-cpu-x86_64-linux"
    metadata = json.loads((variant / "metadata.json").read_text())
    assert re.fullmatch(r"_scaledot_[0-9a-f]{12}", metadata["id"])
    loaded = run([sys.executable, "-c", PROGRAM, str(tmp_path / "kernel")], PYTHONPATH="")
    assert loaded.returncode == 0, loaded.stderr


def test_modules_of_a_kernel_import_each_other_relatively() -> None:
    """Its package is not called scaledot: an absolute import would find another installation, or none."""
    package = ROOT / "python" / "scaledot"
    modules = [path for path in package.rglob("*.py") if "compare" not in path.parts and path.name != "__main__.py"]
    absolute = re.compile(r"^\s*(from scaledot\b|import scaledot\b)", re.MULTILINE)
    code = {path: re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL) for path in modules}
    assert [str(path) for path, text in code.items() if absolute.search(text)] == []


def test_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    made = make(tmp_path, tmp_path / "build")
    assert made.returncode == 2
    assert "folder: got" in made.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
