"""The in-tree PEP 517 backend: setuptools' backend, with checks of torch before anything is downloaded or compiled.

The user's torch is never replaced. A build takes the torch of the user's environment, whatever its patch release. It
stops with one sentence if that torch is too old, or if the environment cannot be seen. Only where there is no torch at
all does it require one.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import setuptools
from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from .torch_folder import (
    REQUIREMENT,
    NoTorchError,
    TorchNotFoundError,
    check_version,
    environment_paths,
    find_torches,
    warning,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
    "runtime_requirement",
]


def _installed_in(package: Path, paths: list[str]) -> bool:
    return package.parent.resolve() in {Path(path).resolve() for path in paths}


def _torch_if_missing() -> list[str]:
    """The build requirement on torch: nothing if there is one to build for. Ends the build if it is not supported."""
    try:
        for folder in find_torches():
            if note := warning(check_version(folder)):
                print(f"scaledot: {note}", file=sys.stderr)
        return []
    except NoTorchError:
        pass
    except TorchNotFoundError as error:
        raise SystemExit(f"scaledot: {error}") from None
    # pip installs a build's requirements outside the user's environment. Other tools make a whole environment for the
    # build, which does not see the user's torch: one required there could be another than the user's.
    if _installed_in(Path(setuptools.__file__).parent, environment_paths()):
        raise SystemExit(
            "scaledot: torch: got a build environment without it, from which the torch of your environment cannot be "
            "seen; needs `pip install .`, or torch, cmake, ninja and setuptools installed and then "
            "`uv pip install --no-build-isolation .` (`python -m build --no-isolation`)"
        )
    return [REQUIREMENT]


def runtime_requirement() -> str:
    """The package's requirement on torch.

    It has no limits, as pip would replace a torch outside of them: a torch that does not fit is refused at import. But
    where pip has just downloaded a torch for the build, the environment has none, and needs that minor version.
    """
    try:
        folders = find_torches()
    except TorchNotFoundError:
        return "torch"
    overlay = len(folders) == 1 and "pip-build-env-" in str(folders[0])
    return f"torch=={'.'.join(check_version(folders[0]).split('.')[:2])}.*" if overlay else "torch"


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return _torch_if_missing() + build_meta.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return _torch_if_missing() + build_meta.get_requires_for_build_editable(config_settings)


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    # setuptools collects the wheel in build/lib.* and would include the files of an earlier build.
    for leftover in Path("build").glob("lib.*"):
        shutil.rmtree(leftover)
    return str(build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))
