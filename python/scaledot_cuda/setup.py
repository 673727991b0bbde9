"""Drives CMake for the wheel scaledot-cuda. The version is that of scaledot: both know the layout of a call."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

PYTHON = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PYTHON))
from scaledot_build.cmake_build import CudaBuild, PlatformWheel  # noqa: E402

found = re.search(r'^version = "(.*)"$', (PYTHON.parent / "pyproject.toml").read_text(), re.MULTILINE)
if found is None:
    raise SystemExit("pyproject.toml of scaledot: needs a line `version = ...`")


class BuildModules(build_py):  # type: ignore[misc]
    """The folder of the package is that of the project, so setup.py would count as one of its modules."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        return [module for module in found if module[1] != "setup"]


setup(
    version=found[1],
    install_requires=[f"scaledot=={found[1]}"],
    ext_modules=[Extension("scaledot_cuda._libraries", sources=[])],  # makes setuptools run build_ext
    cmdclass={"build_ext": CudaBuild, "build_py": BuildModules, "bdist_wheel": PlatformWheel},
)
