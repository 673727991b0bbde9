"""The in-tree PEP 517 backend: setuptools' backend, which requires torch only if the user's environment has none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from .torch_folder import REQUIREMENT, TorchNotFoundError, find_torch

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def _torch_if_missing() -> list[str]:
    """The build requirement on torch, or nothing if the user's environment has a supported torch.

    An unsupported torch counts as missing: the package's runtime requirement makes pip replace it anyway.
    """
    try:
        find_torch()
    except TorchNotFoundError:
        return [REQUIREMENT]
    return []


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + _torch_if_missing()


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + _torch_if_missing()


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    # setuptools collects the wheel in build/lib.* and would include the files of an earlier build.
    for leftover in Path("build").glob("lib.*"):
        shutil.rmtree(leftover)
    return str(build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))
