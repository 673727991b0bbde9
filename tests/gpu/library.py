"""Which build of scaledot a run uses: one that was made elsewhere (tests/gpu/build), that of the source tree, or one
that is made here."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path

from gpu.report import ROOT, Report

PREBUILT = "prebuilt"  # in the work folder: scaledot/lib, and scaledot_cuda in the folders plain and watchdog
WAITS_ARE_ERRORS = "watchdog"


def program(name: str, folder_variable: str = "") -> str:
    """cmake or ninja: from the Python package if it is installed, else from the PATH."""
    try:
        path = Path(getattr(importlib.import_module(name), folder_variable)) / name
    except (ImportError, AttributeError):
        return shutil.which(name) or name
    return str(path) if path.is_file() else shutil.which(name) or name


def find_nvcc() -> str | None:
    """In CUDACXX, on the PATH, in /usr/local, or in NVIDIA's Python packages; the newest of several."""
    for name in (os.environ.get("CUDACXX"), "nvcc"):
        if name and (found := shutil.which(name)):
            return found
    places = [*Path("/usr/local").glob("cuda*/bin/nvcc")]
    places += [path for folder in sys.path if folder for path in Path(folder).glob("nvidia/*/bin/nvcc")]
    return str(max(places)) if places else None


def prebuilt(report: Report) -> Path | None:
    """A folder with the packages scaledot and scaledot_cuda of the build that was made elsewhere, if there is one. The
    Python files are those of the source tree."""
    made = report.work / PREBUILT
    if not made.is_dir():
        return None
    package = report.work / "package"
    shutil.rmtree(package, ignore_errors=True)
    without = shutil.ignore_patterns("lib", "__pycache__")
    shutil.copytree(ROOT / "python" / "scaledot", package / "scaledot", ignore=without)
    shutil.copytree(made / "scaledot" / "lib", package / "scaledot" / "lib")
    shutil.copytree(made / "plain" / "scaledot_cuda", package / "scaledot_cuda")
    return package


def watchdog(report: Report) -> Path | None:
    """A folder with a scaledot_cuda whose waits are an error after two seconds, if there is one."""
    folder = report.work / PREBUILT / WAITS_ARE_ERRORS
    return folder if folder.is_dir() else None


def build(report: Report, capability: str, seconds: float) -> bool:
    """CMake without pip, into python/scaledot/lib. It downloads nothing."""
    import torch

    # Always set: images of CUDA set it to every architecture, and to 9.0 without the a.
    report.environment["TORCH_CUDA_ARCH_LIST"] = capability + ("a" if capability == "9.0" else "")
    if nvcc := find_nvcc():
        report.environment["CUDACXX"] = nvcc
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CUDA_FLAGS": "-lineinfo --split-compile=0",  # all cores for one file
        "CMAKE_MAKE_PROGRAM": program("ninja", "BIN_DIR"),
        "SCALEDOT_CUDA": "1",
        "SCALEDOT_EDITABLE": "1",
        "SCALEDOT_TORCH_DIRS": str(Path(torch.__file__).parent),
        "Python_EXECUTABLE": sys.executable,
    }
    cmake, folder = program("cmake", "CMAKE_BIN_DIR"), str(report.work / "build")
    configure = [
        cmake,
        "-S",
        ".",
        "-B",
        folder,
        "-G",
        "Ninja",
        *(f"-D{name}={value}" for name, value in options.items()),
    ]
    if not report.run("configure", configure, min(seconds, 60)):
        return False
    return report.run("build", [cmake, "--build", folder, "--target", "install"], seconds)
