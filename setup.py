"""Drives CMake for pip. CMakeLists.txt defines the build, pyproject.toml everything else."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup

sys.path.insert(0, str(Path(__file__).parent.resolve() / "python"))
from scaledot_build import runtime_requirement
from scaledot_build.cmake_build import CMakeBuild, PlatformWheel
from scaledot_build.readme import long_description

setup(
    install_requires=[runtime_requirement()],
    long_description=long_description(),
    long_description_content_type="text/markdown",
    ext_modules=[Extension("scaledot._libraries", sources=[])],  # makes setuptools run build_ext
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": PlatformWheel},
)
