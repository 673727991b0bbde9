"""Tables with fixed columns, whose lines can be printed one by one, for terminals of any width."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

_GAP = "  "


def terminal_width() -> int | None:
    """The width of the terminal, or None if standard output is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def wrapped(line: str, width: int | None) -> str:
    """The line, broken at spaces if it is wider than the terminal. Of "name   text" the text stays a column."""
    if width is None or len(line) <= width:
        return line
    named = re.match(r" *(?:\S+ )*\S+ {2,}", line)
    indent = named.end() if named and named.end() <= width // 2 else len(line) - len(line.lstrip()) + 2
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


@dataclass(frozen=True)
class Column:
    name: str
    width: int
    left: bool = False  # adjusted to the left
    drop: int = 0  # where a table is too wide, columns with 1 go first, then those with 2, ...; 0: stays


class Columns:
    """The columns that fit. If not even those that stay do, each row has two lines: what it is, and its numbers."""

    def __init__(self, columns: Sequence[Column], width: int | None, first: int) -> None:
        """`first`: how many columns say what a row is."""
        self.columns = columns
        self.shown = [True] * len(columns)
        for drop in sorted({column.drop for column in columns} - {0}):
            if width is None or self._width() <= width:
                break
            self.shown = [shown and column.drop != drop for shown, column in zip(self.shown, columns, strict=True)]
        self.parts = [slice(None)]
        if width is not None and self._width() > width:
            self.parts = [slice(first), slice(first, None)]

    def _width(self) -> int:
        shown = list(compress(self.columns, self.shown))
        return sum(column.width for column in shown) + len(_GAP) * (len(shown) - 1)

    def line(self, cells: Sequence[str], painted: Mapping[int, str] | None = None) -> str:
        """A row of the table. `painted`: the coloured form of cells that have one, by their number."""
        texts = []
        for number, (column, cell) in enumerate(zip(self.columns, cells, strict=True)):
            pad, text = " " * (column.width - len(cell)), (painted or {}).get(number, cell)
            texts.append(text + pad if column.left else pad + text)
        kept = [_GAP.join(compress(texts[part], self.shown[part])) for part in self.parts]
        return f"\n{2 * _GAP}".join(text.rstrip() for text in kept)

    def heading(self) -> tuple[str, str]:
        """The names of the columns, and the rule below them."""
        names = self.line([column.name for column in self.columns])
        return names, "-" * max(map(len, names.split("\n")))
