"""Code that comparisons of cases and of whole models share: the lines around the table, the files, the exit code."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .columns import terminal_width, wrapped
from .machine import describe
from .noise import Load, end_warnings, load_average, noise_json, start_warnings
from .report import RED, Paint

Step = Callable[[str], None]  # is called with the name of each part of a run before the part
Run = Callable[[Step], Any]  # returns a row


class _Quiet:
    """Replaces the progress bar if tqdm is not installed."""

    def update(self, _: int) -> None: ...

    def set_description_str(self, _: str) -> None: ...

    def write(self, text: str) -> None:
        print(text, flush=True)


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A progress bar on the terminal. Its `write` prints a line above the bar."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        print("(no progress bar without tqdm: run `pip install tqdm`)", file=sys.stderr)
        yield _Quiet()
        return
    layout = "{desc:<48} {bar} {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"
    # disable=None: no bar if standard error is a file.
    with tqdm(total=total, disable=None, leave=False, bar_format=layout, dynamic_ncols=True) as bar:
        yield bar


@contextmanager
def _warnings_afterwards() -> Iterator[None]:
    """Holds back the warnings of libraries, which would split the table, and gives each of them once at the end."""
    with warnings.catch_warnings(record=True) as caught:
        yield
    for warning in {str(warning.message): warning for warning in caught}.values():
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"


class Session:
    """One comparison, from its first line to its exit code."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        head_lines: Callable[[dict[str, Any]], list[str]],
        notes: Sequence[str],
        size: tuple[str, int],
    ) -> None:
        """Sets the number of threads, and prints the lines above the table.

        Args:
            arguments: of the command line.
            head_lines: of the machine.
            notes: printed after them.
            size: what is compared, such as "75 cases", and the number of timings that this needs.
        """
        if arguments.threads is not None:
            torch.set_num_threads(arguments.threads)
        self.arguments, self.notes = arguments, list(notes)
        self.seconds: float = arguments.seconds or (0.05 if arguments.quick else 0.4)
        self.machine = describe(arguments.device)
        self.width = terminal_width()
        self.paint = Paint(self.width is not None and "NO_COLOR" not in os.environ)
        self.load = Load(load_average(), None, os.cpu_count() or 1)
        self.planned = 0
        loads = [self.paint(line, RED) for line in start_warnings(self.load)]
        what, timings = size
        first = f"{what}: about {_duration(timings * self.seconds)} of timing, and more for the checks"
        lines = [wrapped(line, self.width) for line in [first, *head_lines(self.machine), *self.notes]]
        print("\n".join([*lines, *loads, ""]), flush=True)

    def measure(self, planned: Sequence[tuple[str, Run]], table: Any) -> list[Any]:
        """The rows that the named functions return, printed one by one. Ctrl-C ends it early."""
        self.planned = len(planned)
        rows: list[Any] = []
        with _warnings_afterwards(), _progress(len(planned)) as bar, suppress(KeyboardInterrupt):
            bar.write(table.heading())
            for name, run in planned:

                def step(part: str, name: str = name) -> None:
                    bar.set_description_str(f"{name} {part}"[:48])

                rows.append(run(step))
                bar.update(1)
                for line in table.lines(rows[-1]):
                    bar.write(line)
        self.load = replace(self.load, end=load_average())
        return rows

    def finish(
        self,
        rows: Sequence[Any],
        subject: tuple[str, str],
        options: dict[str, Any],
        content: dict[str, Any],
        draw: Callable[..., None] | None,
    ) -> int:
        """Prints the lines below the table, writes the files, and returns the exit code.

        Args:
            rows: from `measure`.
            subject: what was compared, and which of its results.
            options: those of the command line, for the file of ``--json``.
            content: what else that file has.
            draw: writes the file of ``--plot``; None: nothing was timed.
        """
        for line in end_warnings(rows, self.load):
            print("\n" + self.paint(line, RED))
        wrong, complete = sum(not row.verdict.passed for row in rows), len(rows) == self.planned
        report = {
            "format": 1,
            "machine": self.machine,
            "options": {**options, "seconds": self.seconds, "complete": complete},
            "passed": not wrong,
            **content,
            "noise": noise_json(rows, self.load),
            "notes": self.notes,
        }
        path: Path
        if (path := self.arguments.json) is not None:
            path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
            print(f"\nreadings: {path}")
        if (path := self.arguments.plot) is not None and draw is None:
            print("\nno plot: nothing was timed against torch")
        elif path is not None and draw is not None:
            draw(rows, self.machine, path, self.load)
            print(f"\nplot: {path}")
        print("\n" + self._verdict(subject, len(rows), wrong))
        return 1 if wrong else 0 if complete else 130

    def _verdict(self, subject: tuple[str, str], run: int, wrong: int) -> str:
        what, results = subject
        stopped = "" if run == self.planned else f" Stopped after {run} of {self.planned} {what}."
        if wrong:
            return self.paint(f"FAIL: {wrong} of {run} {what} are wrong.", RED) + stopped
        return f"All {run} {what} are right: {results} are within the limits against float64.{stopped}"
