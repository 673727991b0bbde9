"""Helpers for the tests of the command line: cases, errors and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from scaledot.__main__ import main
from scaledot.compare.features import Case, cases_of
from scaledot.compare.shapes import Entry

TINY = ["compare", "--quick", "--seconds", "0.001"]
SMALL = [*TINY, "--shapes", "1x2x24x16", "--dtype", "bfloat16", "--features", "plain,causal"]


def only_case(feature: str, shape: str = "2x4x40x16", dtype: str = "bfloat16") -> Case:
    (case,), notes = cases_of((Entry((shape,), (feature,)),), None, (dtype,))
    assert not notes
    return case


def picture_size(path: Path) -> tuple[int, int]:
    from matplotlib.image import imread

    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    height, width = imread(path).shape[:2]
    return width, height


def refused(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of the error for wrong arguments."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]
