"""The counts of a suite: one table line per check, and a reason for every skip."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class Tally:
    """The cases of one check of one suite."""

    suite: str
    check: str
    passed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Counts the body as one case. An exception is a failure of that case, and the suite continues."""
        try:
            yield
        except Exception as error:
            lines = str(error).strip().splitlines()
            self.failed.append(f"{name}: {type(error).__name__}: {' '.join(lines[:3])[:300]}")
        else:
            self.passed += 1

    def skip(self, reason: str, cases: int = 1) -> None:
        self.skipped[reason] += cases


def table(tallies: Sequence[Tally]) -> str:
    """The counts, then the reasons for skips, then the failures."""
    rows = [("suite", "check", "passed", "skipped", "failed")]
    rows += [(t.suite, t.check, str(t.passed), str(t.skipped.total()), str(len(t.failed))) for t in tallies]
    rows.append(("all", "", *(str(sum(int(row[k]) for row in rows[1:])) for k in range(2, 5))))
    widths = [max(len(row[k]) for row in rows) for k in range(5)]
    lines = []
    for row in rows:
        cells = [cell.ljust(w) if k < 2 else cell.rjust(w) for k, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells))
    for t in tallies:
        lines += [f"skipped, {t.suite}, {t.check}: {count}: {reason}" for reason, count in t.skipped.items()]
    for t in tallies:
        lines += [f"FAILED, {t.suite}, {t.check}: {failure}" for failure in t.failed]
    return "\n".join(lines)
