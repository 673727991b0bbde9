"""The corpus: calls that failed once, one JSON file each. They are replayed before anything is drawn."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from call_sources import Call

FOLDER = Path(__file__).parent / "corpus"


def calls() -> dict[str, Call]:
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        fields = json.loads(path.read_text())
        fields["arguments"] = tuple(fields["arguments"].items())
        found[path.stem] = Call(**fields)
    return found


def add(call: Call) -> Path:
    """Writes the call to the corpus, under a name that its text gives."""
    fields = dataclasses.asdict(call) | {"arguments": dict(call.arguments)}
    text = json.dumps(fields, indent=2) + "\n"
    path = FOLDER / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    path.write_text(text)
    return path
