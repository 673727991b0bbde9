"""The tables of python -m scaledot compare in terminals of any width."""

from __future__ import annotations

import re

import pytest

from command_line import only_case
from scaledot.compare.check import Verdict
from scaledot.compare.columns import Column, Columns, wrapped
from scaledot.compare.report import Paint, Table, summary_lines
from scaledot.compare.run import Pair, Row
from scaledot.compare.timing import Timing

FEATURES = ("plain", "causal", "dropout")
DTYPES = ("float32", "bfloat16", "float16")


def rows() -> list[Row]:
    """Made-up rows: scaledot takes 1 ms, torch 2 ms."""
    pair = Pair(Timing((1e-3,) * 5, 1), Timing((2e-3,) * 5, 1))
    made = []
    for dtype in DTYPES:
        for feature in FEATURES:
            kernels = {"forward": "avx512_decode", "backward": "avx512"}
            passes = {"forward": pair, "backward": pair}
            case = only_case(feature, "1x8x1024x64", dtype)
            made.append(Row(case, "dequantising + F.sdpa", kernels, Verdict({}, 1.0), None, passes))
    return made


def printed(width: int | None, paint: Paint) -> list[str]:
    table = Table([row.case for row in rows()], paint, width)
    blocks = [table.heading(), *(line for row in rows() for line in table.lines(row))]
    blocks += summary_lines(rows(), paint, width)
    return "\n".join(blocks).split("\n")


@pytest.mark.parametrize("coloured", [False, True])
@pytest.mark.parametrize("width", [46, 50, 60, 70, 80, 100, 120, 140, 155, 200])
def test_no_line_is_wider_than_the_terminal(width: int, coloured: bool) -> None:
    lines = [re.sub("\033\\[[0-9;]*m", "", line) for line in printed(width, Paint(coloured))]
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert text.count("2.00x") >= 2 * len(rows())  # no ratio is left out
    for name in ("scaledot", "torch", "ratio", *FEATURES):
        assert name in text


def test_columns_that_do_not_fit_are_left_out() -> None:
    headings = {width: printed(width, Paint(False))[0] for width in (None, 144, 104, 77)}
    assert all(name in headings[None] for name in ("IQR", "error", "limit", "kernel", "torch runs"))
    assert "kernel" not in headings[144]
    assert "limit" in headings[144]
    assert "limit" not in headings[104]
    assert "IQR" in headings[104]
    assert "IQR" not in headings[77]


def test_a_file_has_every_column() -> None:
    assert printed(None, Paint(False))[:2] == printed(1000, Paint(False))[:2]


def test_a_row_that_never_fits_has_two_lines() -> None:
    columns = Columns([Column("name", 8, left=True), Column("time", 8), Column("more", 8, drop=1)], 12, first=1)
    assert columns.heading() == ("name\n        time", "-" * 12)
    assert columns.line(["one", "1 ms", "x"], {1: "<1 ms>"}) == "one\n        <1 ms>"


def test_prose_is_broken_at_spaces() -> None:
    assert wrapped("some words that are long", 12) == "some words\n  that are\n  long"
    assert wrapped("some words that are long", None) == "some words that are long"
