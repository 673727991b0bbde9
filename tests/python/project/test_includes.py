"""The table of folders in csrc/README.md is true: what each may include."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from snippets import ROOT

CSRC = ROOT / "csrc"
TABLE = (CSRC / "README.md").read_text().split("| may include |")[1].split("\n\n")[0]
ROWS = [re.findall(r"`([^`]+)`", row.split("|")[1]) for row in TABLE.splitlines()[2:]]
ALLOWED = [re.findall(r"`([^`]+)`", row.split("|")[3]) for row in TABLE.splitlines()[2:]]
SOURCES = sorted(path for path in CSRC.rglob("*") if path.suffix in {".h", ".cpp", ".cu", ".cuh"})


def row_of(file: Path) -> int:
    """The row with the longest name of a folder that holds the file, or with the file."""
    name = str(file.relative_to(CSRC))
    matches = [(len(place), row) for row, places in enumerate(ROWS) for place in places if name.startswith(place)]
    assert matches, f"no row of csrc/README.md has {name}"
    return max(matches)[1]


def included_by(file: Path) -> list[Path]:
    """Headers of csrc; generated ones, and those of the simulated GPU, are elsewhere."""
    names = re.findall(r'^#include "(.+)"', file.read_text(), re.MULTILINE)
    found = [(file.parent / name if (file.parent / name).exists() else CSRC / name).resolve() for name in names]
    return [path for path in found if path.exists() and path.is_relative_to(CSRC)]


@pytest.mark.parametrize("row", range(len(ROWS)), ids=[" ".join(places) for places in ROWS])
def test_a_folder_includes_what_it_may(row: int) -> None:
    wrong = [
        f"{file.relative_to(CSRC)} includes {header.relative_to(CSRC)}"
        for file in SOURCES
        if row_of(file) == row
        for header in included_by(file)
        if row_of(header) != row and not str(header.relative_to(CSRC)).startswith(tuple(ALLOWED[row]))
    ]
    assert not wrong


def test_torch_stays_outside() -> None:
    files = [file for file in SOURCES if file.relative_to(CSRC).parts[0] in {"core", "cpu", "cuda"}]
    assert len(files) > 100
    assert not [file for file in files if re.search(r"^#include <(ATen|c10|torch)/", file.read_text(), re.MULTILINE)]
