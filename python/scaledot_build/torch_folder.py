"""Finds the torch that scaledot is built for, by path and without importing it. As a script, it prints torch's folder.

pip builds in an isolated environment, which cannot import the user's packages. But pip runs the user's interpreter, so
`sys.prefix` still names the user's environment. The torch found there is the one scaledot will run with.
"""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
from pathlib import Path

_PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
Version = tuple[int, int]


def _torch_range(pyproject: str) -> tuple[str, Version, Version]:
    """(requirement, first, before) from the text of pyproject.toml, the only place that states the range.

    A regular expression reads it, because Python 3.10 has no TOML parser.
    """
    match = re.search(r'^dependencies = \["(torch>=(\d+)\.(\d+),<(\d+)\.(\d+))"\]$', pyproject, re.MULTILINE)
    if match is None:
        raise ValueError(f'{_PYPROJECT}: needs a line `dependencies = ["torch>=X.Y,<X.Y"]`')
    return match[1], (int(match[2]), int(match[3])), (int(match[4]), int(match[5]))


REQUIREMENT, FIRST, BEFORE = _torch_range(_PYPROJECT.read_text())
"""The torch that pip is asked for if there is none; the first supported minor version; the first unsupported one."""


class TorchNotFoundError(Exception):
    """There is no torch that scaledot can be built for. The message says what was found."""


def environment_paths() -> list[str]:
    """The site-packages folders of the user's environment, in the order in which Python would search them."""
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    prefixes = [sys.prefix, sys.exec_prefix]
    settings = Path(sys.prefix) / "pyvenv.cfg"
    shares_system = r"^include-system-site-packages\s*=\s*true"
    if not settings.is_file() or re.search(shares_system, settings.read_text(), re.IGNORECASE | re.MULTILINE):
        paths.append(site.getusersitepackages())
        prefixes += [sys.base_prefix, sys.base_exec_prefix]
    return paths + site.getsitepackages(list(dict.fromkeys(prefixes)))


def torch_version(folder: Path) -> str | None:
    """The version of the torch package in `folder`, or None if there is none."""
    try:
        text = (folder / "version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match and (folder / "lib").is_dir() else None


def supported(version: str) -> bool:
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and FIRST <= (int(match[1]), int(match[2])) < BEFORE


def find_torch() -> Path:
    """The folder of the torch package: first what can be imported here, then the user's environment.

    The environment variable SCALEDOT_TORCH_DIR names another folder. Raises TorchNotFoundError if the first torch found
    has a version that scaledot does not support, or if there is none.
    """
    named = os.environ.get("SCALEDOT_TORCH_DIR")
    folders = [Path(named)] if named else [Path(p or ".") / "torch" for p in sys.path + environment_paths()]
    for folder in folders:
        version = torch_version(folder)
        if version is None:
            continue
        if supported(version):
            return folder.resolve()
        raise TorchNotFoundError(f"torch: got {version} in {folder}; needs {REQUIREMENT} to build scaledot")
    where = f"SCALEDOT_TORCH_DIR={named}" if named else "this Python environment"
    raise TorchNotFoundError(f"torch: got none in {where}; needs {REQUIREMENT} to build scaledot")


if __name__ == "__main__":
    try:
        print(find_torch())
    except TorchNotFoundError as error:
        raise SystemExit(str(error)) from None
