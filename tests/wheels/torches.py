"""The torch packages to build for: their wheels from PyPI, unpacked as far as compiling and linking need them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_PLATFORM = "manylinux_2_28_x86_64"
_LIBRARIES = ("libtorch.so", "libtorch_cpu.so", "libc10.so")


def _is_needed(name: str) -> bool:
    return (
        name.startswith("torch/include/")
        or name == "torch/version.py"
        or name in [f"torch/lib/{library}" for library in _LIBRARIES]
    )


def torch_folder(minor: str, cache: Path) -> Path:
    """The folder of the torch package of this minor version. It is downloaded the first time.

    It is the first patch release, so that the ops need nothing that a later one added. The Python that the wheel is for
    does not matter: the ops use no Python.
    """
    folder = cache / "torch" / minor / "torch"
    if (folder / "version.py").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"== downloading torch {minor}.0", flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        choice = ["--python-version", "3.12", "--implementation", "cp", "--platform", _PLATFORM]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "-d", work]
        subprocess.run([*command, "--only-binary", ":all:", *choice, f"torch=={minor}.0"], check=True)
        (wheel,) = Path(work).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if _is_needed(name)]
            archive.extractall(f"{work}/unpacked", names)
        shutil.rmtree(folder, ignore_errors=True)
        (Path(work) / "unpacked" / "torch").rename(folder)
    return folder
