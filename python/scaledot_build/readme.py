"""README.md as the package's description, which pages like PyPI's show without the files that it links to."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def long_description() -> str:
    """README.md with links and images that lead to the source on GitHub."""
    project = (ROOT / "pyproject.toml").read_text()
    (source,) = re.findall(r'^Source = "https://github\.com/(.+)"$', project, re.MULTILINE)
    text = (ROOT / "README.md").read_text()
    text = re.sub(r'src="(?!https:)', f'src="https://raw.githubusercontent.com/{source}/main/', text)
    return re.sub(r"\]\((?!https:|#)", f"](https://github.com/{source}/blob/main/", text)
