"""Results as lines of JSON in one file, which several processes append to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Lines:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, step: str, **facts: Any) -> None:
        """One write, so that the lines of two processes never mix, and so that a crash loses none."""
        line = json.dumps({"step": step, **facts}, default=str)
        os.write(self.file, f"{line}\n".encode())


def read(path: Path, step: str | None = None) -> Iterator[dict[str, Any]]:
    """The lines of one step, or of all, in order. A last line that is cut off is left out."""
    if not path.is_file():
        return
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if step in (None, line["step"]):
            yield line
