"""A package's wheel as an archive, without installing it or what it depends on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile


def run(*command: str | Path) -> None:
    """Runs a command. A failure shows the end of what it printed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stdout[-2000:]}")


def download(requirement: str, folder: Path) -> ZipFile:
    """Downloads the wheel into the folder, which has no other."""
    run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder, requirement)
    (wheel,) = folder.glob("*.whl")
    return ZipFile(wheel)
