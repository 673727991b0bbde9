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
Minor = tuple[int, int]


def _tried_minors(pyproject: str) -> list[Minor]:
    """The minor versions of torch that scaledot is tested with, from the text of pyproject.toml, which states them.

    A regular expression reads it, because Python 3.10 has no TOML parser.
    """
    table = re.search(r'^\[tool\.scaledot\]\ntorch = \[((?:"\d+\.\d+"(?:, )?)+)\]', pyproject, re.MULTILINE)
    if table is None:
        raise ValueError(f'{_PYPROJECT}: needs a table [tool.scaledot] that begins with `torch = ["X.Y", ...]`')
    return [(int(major), int(minor)) for major, minor in re.findall(r"(\d+)\.(\d+)", table[1])]


def text_of(minor: Minor) -> str:
    return f"{minor[0]}.{minor[1]}"


TRIED = _tried_minors(_PYPROJECT.read_text())
"""The minor versions of torch that scaledot is tested with, the oldest first."""

REQUIREMENT = f"torch>={text_of(TRIED[0])},<{TRIED[-1][0]}.{TRIED[-1][1] + 1}"
"""The torch that pip is asked for if there is none."""


class TorchNotFoundError(Exception):
    """There is no torch that scaledot can be built for. The message says what was found."""


class NoTorchError(TorchNotFoundError):
    """There is no torch at all."""


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


def torch_cuda(folder: Path) -> str | None:
    """The version of CUDA that the torch package in `folder` was built with, or None."""
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", (folder / "version.py").read_text(), re.MULTILINE)
    return match.group(1) if match else None


def minor_of(version: str) -> Minor:
    """(2, 13) of "2.13.0+cpu"; (0, 0) of a version that does not begin with two numbers."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def check_version(folder: Path) -> str:
    """The version of the torch in `folder`; raises TorchNotFoundError if it is older than scaledot supports."""
    version = torch_version(folder)
    if version is None:
        raise TorchNotFoundError(f"torch: got none in {folder}; needs a torch package to build scaledot for")
    if minor_of(version) < TRIED[0]:
        raise TorchNotFoundError(
            f"torch: got {version} in {folder}; needs {text_of(TRIED[0])} or newer to build scaledot (nothing was "
            f"installed or changed)"
        )
    return version


def warning(version: str) -> str | None:
    """A warning about a torch that scaledot was not tested with, or None."""
    if minor_of(version) <= TRIED[-1]:
        return None
    return (
        f"torch {version} is newer than the newest that scaledot was tested with, {text_of(TRIED[-1])}. It is built "
        f"all the same; run `python -m scaledot compare --quick` to check it."
    )


def named_folders() -> list[Path]:
    """The torch packages that the environment variable SCALEDOT_TORCH_DIRS names, separated by colons."""
    return [Path(name).resolve() for name in os.environ.get("SCALEDOT_TORCH_DIRS", "").split(os.pathsep) if name]


def find_torches() -> list[Path]:
    """The folders of the torch packages to build for, of different minor versions.

    They are those of SCALEDOT_TORCH_DIRS, or the first torch that can be imported here or in the user's environment.
    Raises TorchNotFoundError if there is none, or if one is too old.
    """
    named = named_folders()
    found = [Path(path or ".") / "torch" for path in sys.path + environment_paths()]
    folders = named or [folder.resolve() for folder in found if torch_version(folder) is not None][:1]
    if not folders:
        raise NoTorchError(f"torch: got none in this Python environment; needs {REQUIREMENT} to build scaledot")
    minors = [minor_of(check_version(folder)) for folder in folders]
    if len(set(minors)) < len(minors):
        raise TorchNotFoundError(
            f"SCALEDOT_TORCH_DIRS: got {', '.join(map(text_of, minors))}; needs one torch of each minor version"
        )
    return folders


if __name__ == "__main__":
    try:
        print(";".join(map(str, find_torches())))
    except TorchNotFoundError as error:
        raise SystemExit(str(error)) from None
