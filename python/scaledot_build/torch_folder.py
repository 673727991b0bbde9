"""Finds the torch that scaledot is built for, by path and without importing it; as a script, prints its folder.

pip builds in an environment of its own, in which the user's packages cannot be imported. But it runs the user's
interpreter, so `sys.prefix` still names the user's environment, and the torch there is the one scaledot will run with.
"""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
from pathlib import Path

FIRST, BEFORE = (2, 11), (2, 14)
REQUIREMENT = "torch>={}.{},<{}.{}".format(*FIRST, *BEFORE)
"""What pip is asked for where there is no torch; the same as in pyproject.toml."""


class TorchNotFoundError(Exception):
    """There is no torch that scaledot can be built for; the message says what there is."""


def environment_paths() -> list[str]:
    """site-packages folders of the user's environment, in the order in which Python would search them."""
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    prefixes = [sys.prefix, sys.exec_prefix]
    settings = Path(sys.prefix) / "pyvenv.cfg"
    shares_system = r"^include-system-site-packages\s*=\s*true"
    if not settings.is_file() or re.search(shares_system, settings.read_text(), re.IGNORECASE | re.MULTILINE):
        paths.append(site.getusersitepackages())
        prefixes += [sys.base_prefix, sys.base_exec_prefix]
    return paths + site.getsitepackages(list(dict.fromkeys(prefixes)))


def torch_version(folder: Path) -> str | None:
    """The version of the torch package in `folder`, None if there is none."""
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
    """The folder of the torch package: what can be imported here first, then the user's environment.

    The environment variable SCALEDOT_TORCH_DIR names another one. Raises TorchNotFoundError if no version that
    scaledot supports is there.
    """
    named = os.environ.get("SCALEDOT_TORCH_DIR")
    folders = [Path(named)] if named else [Path(p or ".") / "torch" for p in sys.path + environment_paths()]
    for folder in folders:
        version = torch_version(folder)
        if version is None:
            continue
        if supported(version):
            return folder.resolve()
        raise TorchNotFoundError(f"scaledot is built for {REQUIREMENT}, but torch {version} is in {folder}")
    where = f"SCALEDOT_TORCH_DIR={named}" if named else "this Python environment"
    raise TorchNotFoundError(f"scaledot is built for {REQUIREMENT}, but there is no torch in {where}")


if __name__ == "__main__":
    try:
        print(find_torch())
    except TorchNotFoundError as error:
        raise SystemExit(str(error)) from None
