"""Tries a wheel in a clean environment: no compiler, no source tree, nothing but torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from tests.snippets import ROOT, Fence, comparable, fences

CORE_TESTS = [
    "dropin/test_dropin_sdpa", "dropin/test_dropin_torch_nn", "input/test_sdpa_bad_input",
    "integration/test_functional", "integration/test_functorch", "integration/test_modules",
    "integration/test_sdpa_torch", "numerics/test_masks", "numerics/test_merge_states", "numerics/test_sdpa_dropout",
    "numerics/test_sdpa_masks", "threads/test_free_threading", "varlen/test_varlen", "varlen/test_varlen_bad_input",
    "varlen/test_varlen_pages",
]  # fmt: skip
"""Tests that need no compiler, no source tree, and no package besides pytest and numpy. The thousands of cases of
test_sdpa_forward and the like are not among them: the kernels are the same under every torch and Python."""

_FIRST_RESULT = """
import time
start = time.perf_counter()
import torch
torch_imported = time.perf_counter()
import sys, scaledot
query = torch.randn(1, 4, 128, 64, requires_grad=True)
scaledot.scaled_dot_product_attention(query, query, query).sum().backward()
end = time.perf_counter()
info = scaledot.build_info()
assert torch.__version__.startswith(info["torch"].rsplit(".", 1)[0] + "."), (torch.__version__, info)
print(f"torch {torch.__version__} imported in {torch_imported - start:.1f} s, then the first result in "
      f"{end - torch_imported:.2f} s, by the ops for torch {info['torch']}")
"""

_NO_COMPILER = """
import shutil
found = [name for name in ("cc", "c++", "gcc", "g++", "clang", "nvcc", "ninja", "cmake") if shutil.which(name)]
assert not found, found
"""


class Environment:
    """A new virtual environment; removed at the end of a `with` block."""

    def __init__(self, cache: Path) -> None:
        cache.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="environment-", dir=cache))
        self.home = self.folder / "home"

    def __enter__(self) -> Environment:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder)

    def create(self, python: Path, minor: str) -> None:
        """Makes the environment, with a torch of this minor version."""
        self.home.mkdir()
        subprocess.run([str(python), "-m", "venv", str(self.folder / "venv")], check=True)
        # Without a compiler pip has to take the newest numpy that has a wheel for this Python.
        self.pip("install", "--no-compile", "--only-binary=:all:", f"torch=={minor}.*", "numpy")
        self.run("-c", "import torch")  # compiles what is imported, so that the next import takes the usual time

    def variables(self) -> dict[str, str]:
        """PATH has the environment's programs alone. What pip was told about its index is kept."""
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
        folders = {"PATH": str(self.folder / "venv" / "bin"), "HOME": str(self.home), "TMPDIR": str(self.folder)}
        return {**kept, **folders, "LANG": "C.UTF-8", "OMP_WAIT_POLICY": "passive"}

    def run(self, *arguments: str, where: Path | None = None, capture: bool = False) -> str:
        """Runs the environment's Python. Raises CalledProcessError if it fails."""
        python = str(self.folder / "venv" / "bin" / "python")
        output = subprocess.PIPE if capture else None
        command, cwd = [python, *arguments], where or self.home
        return subprocess.run(command, stdout=output, env=self.variables(), cwd=cwd, text=True, check=True).stdout or ""

    def pip(self, *arguments: str) -> None:
        self.run("-m", "pip", "-q", "--no-cache-dir", "--disable-pip-version-check", *arguments)

    def install(self, wheels: list[Path]) -> None:
        """Installs the wheels and prints how long it takes from there to the first result."""
        self.run("-c", _NO_COMPILER)
        start = time.monotonic()
        self.pip("install", "--no-index", *map(str, wheels))
        installed = time.monotonic()
        self.run("-c", _FIRST_RESULT)
        end = time.monotonic()
        print(f"installed in {installed - start:.1f} s; to the first result {end - start:.1f} s", flush=True)

    def run_readme(self) -> None:
        """The first example of README.md prints what the page says."""
        example: Fence = next(fence for fence in fences("python") if fence.page == ROOT / "README.md")
        found = self.run("-c", example.text, capture=True)
        if example.output is None or comparable(found) != comparable(example.output):
            raise AssertionError(f"{example.name} prints\n{found}\nand the page says\n{example.output}")

    def compare(self) -> None:
        """`python -m scaledot compare --quick`: every result is right. Its timings are short, and not read."""
        found = self.run("-m", "scaledot", "compare", "--quick", "--seconds", "0.001", capture=True)
        print("\n".join(line for line in found.splitlines() if "right" in line), flush=True)

    def run_tests(self) -> None:
        """The tests that do not need the source tree, in a folder without it."""
        self.pip("install", "pytest")
        folder = self.folder / "source"
        (folder / "tests").mkdir(parents=True)
        shutil.copy(ROOT / "pyproject.toml", folder)  # the settings of pytest
        shutil.copy(ROOT / "tests" / "conftest.py", folder / "tests")
        for name in ("library", "data"):
            shutil.copytree(ROOT / "tests" / name, folder / "tests" / name)
        files = [f"tests/python/{name}.py" for name in CORE_TESTS]
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, folder / file)
        self.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, where=folder)
