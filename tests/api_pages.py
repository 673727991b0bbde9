"""The tables of docs/api: each name with the first sentence of its docstring, and signatures, for readers of the file.

    python tests/api_pages.py     writes them anew

GitHub and editors show the directives that Sphinx fills as they stand. So the names of each block of directives stand
in a table above it, with links to the source, and below the table what can be called, with arguments and defaults.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import scaledot

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
BLOCK = re.compile(r"(?:<!-- names: begin -->\n.*?<!-- names: end -->\n\n)?(```\{eval-rst\}\n(.*?)^```$)", re.M | re.S)
_DIRECTIVE = re.compile(r"^\.\. (?:auto\w+|py:\w+):: (\S+)$((?:\n+ .*)*)", re.MULTILINE)
_PACKAGE = Path(scaledot.__file__).parent
_SOURCE = ROOT / "python" / "scaledot"


def with_tables(page: str) -> str:
    """The text of a page with the table and the signatures of each block of directives above it."""
    return BLOCK.sub(lambda block: f"{_table(block[2])}{block[1]}", page)


def _table(block: str) -> str:
    described = _DIRECTIVE.findall(block)
    lines = ["<!-- names: begin -->", "| name | what it is |", "|---|---|"]
    lines += [_row(name, content) for name, content in described]
    if calls := [call for name, content in described for call in _calls(name, content)]:
        lines += ["", "```text", *calls, "```"]
    return "\n".join([*lines, "<!-- names: end -->", "", ""])


def _calls(name: str, content: str) -> Iterator[str]:
    """The signatures of a function, or of a class and those of its methods that the page describes."""
    found = _find(name)
    if found is None or inspect.ismodule(found):
        return
    yield _signature(name, found, skipped=0)
    members = re.search(r":members:(.*)", content)
    if members and inspect.isclass(found):
        public = (member for member in vars(found) if not member.startswith("_"))
        for member in members[1].replace(",", " ").split() or public:
            method = getattr(found, member, None)  # None for an attribute of the instances
            if inspect.isroutine(method):
                yield _signature(f"{name}.{member}", method, skipped=0 if inspect.ismethod(method) else 1)


def _signature(name: str, found: Any, skipped: int) -> str:
    """`skipped`: how many of the first arguments are left out, 1 for `self`."""
    signature = inspect.signature(found)
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()][skipped:]
    call = f"{name}{signature.replace(parameters=parameters, return_annotation=signature.empty)}"
    whole = re.sub(r"=\([^)]*\)", lambda pair: pair[0].replace(" ", "~"), call)  # no line ends inside of a default
    lines = textwrap.fill(whole, 120, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return lines.replace("~", " ")


def _row(name: str, content: str) -> str:
    """`content`: the lines below a directive, the description of what has no docstring."""
    found = _find(name)
    about, source = _constant(name) if found is None else _documented(found)
    written = [line for line in content.splitlines() if line.strip() and not line.strip().startswith(":")]
    return f"| [`{name}`](../../python/scaledot/{source}) | {_sentence(about or ' '.join(written))} |"


def _find(name: str) -> Any:
    """The module, function or class of that name; None for a variable."""
    module, _, attribute = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ImportError:
        found = getattr(importlib.import_module(module), attribute)
        return found if inspect.isroutine(found) or inspect.isclass(found) else None


def _documented(found: Any) -> tuple[str, str]:
    """(the docstring, the file below python/scaledot)."""
    return found.__doc__ or "", Path(inspect.getfile(inspect.unwrap(found))).relative_to(_PACKAGE).as_posix()


def _constant(name: str) -> tuple[str, str]:
    """The same of a variable of a module: the string below its assignment."""
    variable = name.rpartition(".")[2]
    for path in sorted(_SOURCE.rglob("*.py")):
        body = ast.parse(path.read_text()).body
        for statement, after in zip(body, [*body[1:], None], strict=True):
            targets = [*getattr(statement, "targets", ()), getattr(statement, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == variable for target in targets):
                text = after.value if isinstance(after, ast.Expr) else None
                about = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
                return about, path.relative_to(_SOURCE).as_posix()
    raise ValueError(f"{name}: found no assignment")


def _sentence(text: str) -> str:
    """The first sentence, in Markdown."""
    paragraph = " ".join(inspect.cleandoc(text).split("\n\n")[0].split())
    first = re.match(r".*?\.(?= |$)|.*", paragraph)
    assert first is not None
    plain = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", first[0]).replace("``", "`").replace("|", "\\|")
    return plain.rstrip(":. ") + "."


if __name__ == "__main__":
    for file in PAGES:
        file.write_text(with_tables(file.read_text()))
