"""Drives CMake (CMakeLists.txt), which defines the build; everything else is in pyproject.toml."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "python"))
from scaledot_build.torch_folder import REQUIREMENT, TorchNotFoundError, find_torch, torch_version  # noqa: E402


def program(name: str, folder_variable: str) -> str:
    """cmake or ninja: from the Python package of that name if there is one, else from the PATH."""
    with contextlib.suppress(ImportError, AttributeError):
        path = Path(getattr(importlib.import_module(name), folder_variable)) / name
        if path.is_file():
            return str(path)
    found = shutil.which(name)
    if not found:
        raise SystemExit(f"{name} is needed to build scaledot: pip install {name}")
    return found


class CMakeBuild(build_ext):
    """Configures, builds and installs with CMake, into the wheel or (editable) into python/scaledot."""

    def run(self) -> None:
        try:
            torch = find_torch()
        except TorchNotFoundError as error:
            raise SystemExit(f"{error}: pip install {REQUIREMENT!r}") from None
        # A folder for each Python and torch, kept from build to build: only what changed is compiled again.
        version = torch_version(torch)
        default = ROOT / "build" / f"{sys.implementation.cache_tag}-torch-{version}"
        build = Path(os.environ.get("SCALEDOT_BUILD_DIR", default)).resolve()
        in_place = self.inplace or self.editable_mode
        prefix = ROOT / "python" / "scaledot" if in_place else Path(self.build_lib).resolve() / "scaledot"
        cmake = program("cmake", "CMAKE_BIN_DIR")
        # Every setting is passed each time, for build/ outlives the environment that pip built in before.
        settings = {
            "CMAKE_BUILD_TYPE": os.environ.get("CMAKE_BUILD_TYPE", "Release"),
            "CMAKE_MAKE_PROGRAM": program("ninja", "BIN_DIR"),
            "Python_EXECUTABLE": sys.executable,
            "SCALEDOT_BUILD_TESTS": os.environ.get("SCALEDOT_BUILD_TESTS", "0"),
            "SCALEDOT_CUDA": os.environ.get("SCALEDOT_CUDA", "auto"),
            "SCALEDOT_EDITABLE": int(in_place),
            "SCALEDOT_TORCH_DIR": torch,
            "SCALEDOT_WERROR": os.environ.get("SCALEDOT_WERROR", "0"),
        }
        definitions = [f"-D{name}={value}" for name, value in settings.items()]
        self.call(cmake, "-S", ROOT, "-B", build, "-G", "Ninja", *definitions)
        self.call(cmake, "--build", build)
        self.call(cmake, "--install", build, "--prefix", prefix)
        self.installed = (build / "install_manifest.txt").read_text().splitlines()

    def call(self, *command: object) -> None:
        try:
            subprocess.run([str(part) for part in command], check=True)
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"scaledot: `{' '.join(map(str, command))}` failed; see above") from error

    def get_outputs(self) -> list[str]:
        return getattr(self, "installed", [])

    def get_output_mapping(self) -> dict[str, str]:
        return {}  # an editable install's files are where CMake put them

    def get_source_files(self) -> list[str]:
        """What the sdist needs beside the packages."""
        folders = ["csrc", "tests", "python/scaledot_build"]
        found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
        kept = [path for path in found if "__pycache__" not in path.parts]
        return ["CMakeLists.txt", "CHANGELOG.md", *sorted(str(path.relative_to(ROOT)) for path in kept)]


setup(ext_modules=[Extension("scaledot._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
