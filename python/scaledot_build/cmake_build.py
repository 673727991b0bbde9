"""setuptools' commands: they drive CMake, and name the wheel."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

from .notice import archs_of, notice, show
from .torch_folder import REQUIREMENT, TorchNotFoundError, check_version, find_torches, torch_cuda, warning

ROOT = Path(__file__).resolve().parents[2]


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


def switch(name: str) -> str:
    """The value of an environment variable that turns something on, 0 or 1. Another value ends the build."""
    value = os.environ.get(name) or "0"
    if value not in ("0", "1"):
        raise SystemExit(f"{name}: got {value!r}; needs 1 or 0")
    return value


def cmake_settings(in_place: bool) -> dict[str, object]:
    """The settings of every build. The build folder outlives pip's temporary environment: all are passed each time."""
    return {
        "CMAKE_BUILD_TYPE": os.environ.get("CMAKE_BUILD_TYPE", "Release"),
        "CMAKE_MAKE_PROGRAM": program("ninja", "BIN_DIR"),
        "Python_EXECUTABLE": sys.executable,
        "SCALEDOT_BUILD_TESTS": switch("SCALEDOT_BUILD_TESTS"),
        "SCALEDOT_CUDA": os.environ.get("SCALEDOT_CUDA", "auto"),
        "SCALEDOT_EDITABLE": int(in_place),
        "SCALEDOT_OP_NAMESPACE": "scaledot",
        "SCALEDOT_OPS": 1,
        "SCALEDOT_WERROR": switch("SCALEDOT_WERROR"),
    }


def build_and_install(
    folder: str, settings: dict[str, object], prefix: Path, *, strip: bool, component: str | None = None
) -> Path:
    """Builds in build/<folder> and installs to `prefix`: everything, or one component (csrc/cmake/package.cmake).

    The target that builds a component is called scaledot_<component>. Returns the build folder.
    """
    # The build folder of each torch stays between builds, so that only changed files are compiled again.
    build = Path(os.environ.get("SCALEDOT_BUILD_DIR", ROOT / "build" / folder)).resolve()
    cmake = program("cmake", "CMAKE_BIN_DIR")
    definitions = [f"-D{name}={value}" for name, value in settings.items()]
    call(cmake, "-S", ROOT, "-B", build, "-G", "Ninja", *definitions)
    if settings["SCALEDOT_OPS"]:
        torches = [Path(name) for name in str(settings["SCALEDOT_TORCH_DIRS"]).split(";")]
        show(notice(archs_of(build), any(torch_cuda(torch) for torch in torches)))
    target = ["--target", f"scaledot_{component}"] if component else []
    part = ["--component", component] if component else []
    call(cmake, "--build", build, *target)
    call(cmake, "--install", build, "--prefix", prefix, *part, *(["--strip"] if strip else []))
    return build


def call(*command: object) -> None:
    try:
        subprocess.run([str(part) for part in command], check=True)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"scaledot: `{' '.join(map(str, command))}` failed; see the output above") from error


class CMakeBuild(build_ext):
    """Configures, builds and installs with CMake: into the wheel, or into python/scaledot for an editable install."""

    def run(self) -> None:
        try:
            torches = find_torches()
        except TorchNotFoundError as error:
            raise SystemExit(f"scaledot: {error}: run `pip install {REQUIREMENT!r}`") from None
        versions = [check_version(torch) for torch in torches]
        for version in versions:
            if note := warning(version):
                print(f"warning: {note}", file=sys.stderr)
        in_place = self.inplace or self.editable_mode
        settings = {**cmake_settings(in_place), "SCALEDOT_TORCH_DIRS": ";".join(map(str, torches))}
        prefix = ROOT / "python" / "scaledot" if in_place else Path(self.build_lib).resolve() / "scaledot"
        self.cmake(f"torch-{'-'.join(versions)}", settings, prefix, strip=not in_place)

    def cmake(
        self, folder: str, settings: dict[str, object], prefix: Path, *, strip: bool, component: str | None = None
    ) -> None:
        build = build_and_install(folder, settings, prefix, strip=strip, component=component)
        manifest = f"install_manifest_{component}.txt" if component else "install_manifest.txt"
        self.installed = (build / manifest).read_text().splitlines()

    def get_outputs(self) -> list[str]:
        return getattr(self, "installed", [])

    def get_output_mapping(self) -> dict[str, str]:
        return {}  # in an editable install the files stay where CMake put them

    def get_source_files(self) -> list[str]:
        """The files that the sdist needs besides the packages."""
        folders = ["csrc", "tests", "python/scaledot_build"]
        found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
        kept = [path for path in found if "__pycache__" not in path.parts]
        single = ["CMakeLists.txt", "CMakePresets.json", "CHANGELOG.md"]
        return single + sorted(str(path.relative_to(ROOT)) for path in kept)


class CudaBuild(CMakeBuild):
    """Builds lib/libscaledot_cuda.so alone, for the package scaledot_cuda. It needs nvcc, and no torch."""

    def run(self) -> None:
        settings = {**cmake_settings(False), "SCALEDOT_BUILD_TESTS": 0, "SCALEDOT_CUDA": 1, "SCALEDOT_OPS": 0}
        prefix = Path(self.build_lib).resolve() / "scaledot_cuda"
        self.cmake("cuda", settings, prefix, strip=True, component="cuda")


class PlatformWheel(bdist_wheel):
    """A wheel for every Python 3: the libraries need the machine and torch, but nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]
