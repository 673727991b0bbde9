"""Drives CMake for pip. CMakeLists.txt defines the build, pyproject.toml everything else."""

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
    """The path of cmake or ninja: from the Python package of that name if it is installed, else from PATH."""
    with contextlib.suppress(ImportError, AttributeError):
        path = Path(getattr(importlib.import_module(name), folder_variable)) / name
        if path.is_file():
            return str(path)
    found = shutil.which(name)
    if not found:
        raise SystemExit(f"building scaledot needs {name}: run `pip install {name}`")
    return found


class CMakeBuild(build_ext):
    """Configures, builds and installs with CMake: into the wheel, or into python/scaledot for an editable install."""

    def run(self) -> None:
        try:
            torch = find_torch()
        except TorchNotFoundError as error:
            raise SystemExit(f"{error}: run `pip install {REQUIREMENT!r}`") from None
        # One build folder per Python and torch, kept between builds, so that only changed files are compiled again.
        version = torch_version(torch)
        default = ROOT / "build" / f"{sys.implementation.cache_tag}-torch-{version}"
        build = Path(os.environ.get("SCALEDOT_BUILD_DIR", default)).resolve()
        in_place = self.inplace or self.editable_mode
        prefix = ROOT / "python" / "scaledot" if in_place else Path(self.build_lib).resolve() / "scaledot"
        cmake = program("cmake", "CMAKE_BIN_DIR")
        # The build folder outlives pip's temporary environment, so every setting is passed each time.
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
            raise SystemExit(f"scaledot: `{' '.join(map(str, command))}` failed; see the output above") from error

    def get_outputs(self) -> list[str]:
        return getattr(self, "installed", [])

    def get_output_mapping(self) -> dict[str, str]:
        return {}  # in an editable install the files stay where CMake put them

    def get_source_files(self) -> list[str]:
        """The files that the sdist needs besides the packages."""
        folders = ["csrc", "tests", "python/scaledot_build"]
        found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
        kept = [path for path in found if "__pycache__" not in path.parts]
        return ["CMakeLists.txt", "CHANGELOG.md", *sorted(str(path.relative_to(ROOT)) for path in kept)]


setup(ext_modules=[Extension("scaledot._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
