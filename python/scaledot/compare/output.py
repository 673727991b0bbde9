"""What a comparison shows and writes while it runs: the progress bar and the file of --json."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INSTALL = "pip install matplotlib tqdm"


class _Quiet:
    """Replaces the progress bar if tqdm is not installed."""

    def update(self, _: int) -> None: ...

    def set_description_str(self, _: str) -> None: ...

    def write(self, text: str) -> None:
        print(text, flush=True)


@contextmanager
def progress(total: int) -> Iterator[Any]:
    """A progress bar on the terminal. Its `write` prints a line above the bar."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        print(f"(no progress bar without tqdm: run `{INSTALL}`)", file=sys.stderr)
        yield _Quiet()
        return
    layout = "{desc:<48} {bar} {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"
    # disable=None: no bar if standard error is a file.
    with tqdm(total=total, disable=None, leave=False, bar_format=layout, dynamic_ncols=True) as bar:
        yield bar


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Writes the file of --json, if there is to be one."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        print(f"\nreadings: {path}")
