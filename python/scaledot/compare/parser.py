"""The parser of the command line: its errors name the option that is meant, and a closed pipe ends it in silence."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["CLOSED_PIPE", "Parser", "closed_pipe_ends"]

CLOSED_PIPE = 141  # the exit code that a shell gives a program that SIGPIPE ended


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors for an unknown option name the closest one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As the base class, which is called for each command: so the error has the options of that command."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            close = difflib.get_close_matches(name, self._option_string_actions, n=1)
            meant = f"did you mean {close[0]}?" if close else f"`{self.prog} --help` lists the options"
            self.error(f"got {name!r}, which is no option: {meant}")
        return found, unknown

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
