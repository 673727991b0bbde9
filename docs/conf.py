"""Sphinx configuration; docs/build runs it. Warnings are errors, and nothing is fetched from the network."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer

import scaledot

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"

project = "scaledot"
author = "scaledot authors"
copyright = author
release = version = scaledot.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", ".venv"]
source_suffix = {".md": "markdown"}

html_theme = "furo"
html_title = f"scaledot {release}"
html_static_path = ["_static"]
html_css_files = ["scaledot.css"]
html_copy_source = False
highlight_language = "none"  # blocks of docstrings are formulas; all others name their language
pygments_style = "friendly"
pygments_dark_style = "monokai"

autodoc_typehints = "none"  # the docstrings give shapes, dtypes and defaults
napoleon_use_rtype = False  # what a function returns is described, not named by a type
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

default_role = "code"  # `x` in a docstring
nitpicky = True
# torch's own inventory cannot be fetched offline, so its names are not resolved.
nitpick_ignore_regex = [("py:.*", r"torch(\..*)?")]

myst_heading_anchors = 3

# The menu of the site. It is not in index.md, where readers of the file would see it as code; they have its links.
MENU = {
    "Start": "quickstart comparison compatibility faq",
    "Guides": (
        "guides/masks guides/block_masks guides/gqa guides/relative_bias guides/score_mods guides/key_indices "
        "guides/weights guides/dropout guides/packed guides/transformers guides/transformers_models "
        "guides/flash_attn guides/export guides/cpp distributed"
    ),
    "Migrate": "migrate/sdpa migrate/multihead_attention migrate/flash_attn",
    "API": "api/functions api/modules api/masks api/score_mods api/plot api/dropin api/distributed api/cpp",
    "Evidence": "benchmarks numerics gradients reliability suites",
    "Inside": "tour cpu_kernels gpu_kernels glossary extending release_policy",
}


def show_menu(app: Any, name: str, source: list[str]) -> None:
    """Adds the menu to the first page, and the pages of the machines to that of the benchmarks."""
    if name == "index":
        for caption, listed in MENU.items():
            source[0] += toctree(caption, listed.split())
    elif name == "benchmarks":
        source[0] += toctree("Machines", re.findall(r"^- \[.*\]\((benchmarks/\w+)\.md\)$", source[0], re.MULTILINE))


def toctree(caption: str, listed: list[str]) -> str:
    return "\n".join(["", "```{toctree}", f":caption: {caption}", ":hidden:", "", *listed, "```", ""])


def public_headers() -> list[Path]:
    """What csrc/scaledot.h includes of the folders ops and nn, and what these headers include of them."""
    found: list[Path] = []

    def visit(header: Path) -> None:
        for name in re.findall(r'^#include "(.+)"', header.read_text(), re.MULTILINE):
            for included in ((header.parent / name).resolve(), CSRC / name):
                public = included.is_relative_to(CSRC / "ops") or included.is_relative_to(CSRC / "nn")
                if public and included.is_file() and included not in found:
                    visit(included)
                    found.append(included)

    visit(CSRC / "scaledot.h")
    return sorted(found, key=lambda header: header.is_relative_to(CSRC / "nn"))  # functions before modules


def as_code_block(header: Path) -> str:
    return f"```{{code-block}} cpp\n:caption: scaledot/{header.relative_to(CSRC)}\n\n{header.read_text()}\n```"


def show_headers(app: Any, name: str, source: list[str]) -> None:
    """Adds the headers to the page that links to them: a reader of the site need not leave it."""
    if name == "api/cpp":
        source[0] = re.sub(r"\[([^]]+)\]\(\.\./\.\./csrc/[^)]+\)", r"`\1`", source[0])
        source[0] += "\n" + "\n\n".join(as_code_block(header) for header in public_headers())


def leave_tables(app: Any, name: str, source: list[str]) -> None:
    """The tables of names (tests/api_pages.py) are for readers of the files. The site has all that they say."""
    source[0] = re.sub(r"<!-- names: begin -->.*?<!-- names: end -->\n", "", source[0], flags=re.DOTALL)


def one_signature(app: Any) -> None:
    """Overloads repeat the whole signature for each type of result; a page shows the one that runs."""
    for name in [name for name in sys.modules if name.startswith("scaledot.")]:
        with contextlib.suppress(PycodeError):
            analyzer = ModuleAnalyzer.for_module(name)
            analyzer.analyze()
            analyzer.overloads.clear()


def keep_bars(app: Any, what: str, name: str, subject: Any, options: Any, lines: list[str]) -> None:
    """|x| in a docstring is an absolute value, not a substitution."""
    lines[:] = [re.sub(r"\|(\w+)\|", r"\\|\1\\|", line) for line in lines]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", keep_bars)
    app.connect("builder-inited", one_signature)
    app.connect("source-read", show_headers)
    app.connect("source-read", show_menu)
    app.connect("source-read", leave_tables)
