"""The parser of the command line: errors name what is meant, help fits the terminal, a closed pipe ends it quietly."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .columns import wrapped

__all__ = ["CLOSED_PIPE", "HelpLines", "Parser", "closed_pipe_ends", "did_you_mean"]

CLOSED_PIPE = 141  # the exit code that a shell gives a program that SIGPIPE ended


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error for an unknown name: the known one that is closest, if any is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {close[0]}?" if close else ""


class HelpLines(argparse.HelpFormatter):
    """Keeps the lines of descriptions and epilogs, and breaks those that are too long for the terminal."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(wrapped(indent + line, width) for line in text.splitlines())


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors for an unknown option, command or choice name the closest one.

    It takes no abbreviation: a new option would change what it means.
    """

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As the base class, which is called for each command: so the error has the options of that command."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            meant = did_you_mean(name, self._option_string_actions) or f": `{self.prog} --help` lists the options"
            self.error(f"got {name!r}, which is no option{meant}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            needs = f"needs one of {', '.join(map(str, action.choices))}"
            raise argparse.ArgumentError(action, f"got {value!r}; {needs}{did_you_mean(str(value), action.choices)}")

    def fail_without_command(self, names: Sequence[str]) -> None:
        """Prints the help with the list of commands, and ends the program as any wrong call does."""
        self.print_help(sys.stderr)
        self.exit(2, f"\n{self.prog}: error: COMMAND: got none; needs one of {', '.join(names)}\n")


def closed_pipe_ends(run: Callable[[], int]) -> int:
    """Returns what `run` returns, or `CLOSED_PIPE` if the reader of the output has gone, as in ``| head -2``."""
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()  # else Python finds the closed pipe at its exit, and prints a traceback
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
