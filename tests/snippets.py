"""The fenced code blocks of README.md and docs/**/*.md, how one is run, and the public modules.

Blocks of `python` are run. One of `py` needs what the tests do not have, such as the weights of a model.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import itertools
import os
import re
import symtable
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r"^```(\{?[\w-]*\}?)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_KERNEL = re.compile(r"\b((default|avx2|avx512(_bf16)?|amx_bf16|neon(_bf16)?)(_decode)?)\b")
_SIZE = re.compile(r"\b\d+(\.\d)? (bytes|[KMG]iB)")


@dataclass(frozen=True)
class Fence:
    page: Path
    line: int  # of the opening fence, counted from 1
    language: str
    text: str
    output: str | None  # the text block that follows, with nothing between

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """README.md, and the pages of docs/ that are part of the source."""
    made = {"_build", ".venv"}
    found = (page for page in (ROOT / "docs").rglob("*.md") if not made.intersection(page.relative_to(ROOT).parts))
    return [ROOT / "README.md", *sorted(found)]


def fences(language: str) -> list[Fence]:
    """All blocks of a language, in every page."""
    found = []
    for page in pages():
        source = page.read_text()
        blocks = list(_FENCE.finditer(source))
        for block, after in itertools.zip_longest(blocks, blocks[1:]):
            if block[1] != language:
                continue
            follows = after is not None and after[1] == "text" and not source[block.end() : after.start()].strip()
            line = source.count("\n", 0, block.start()) + 1
            found.append(Fence(page, line, language, block[2], after[2] if after and follows else None))
    return found


def run_python(fence: Fence) -> str:
    """Runs a block in a new namespace and returns what it prints. Tracebacks name the page and its line."""
    code = compile("\n" * fence.line + fence.text, str(fence.page), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "__main__"})
    return printed.getvalue()


def comparable(output: str) -> str:
    """Without what depends on the machine: the kernels, sizes and refusals that `explain` prints."""
    if "scaledot on " not in output:
        return output.rstrip()
    lines = [line for line in output.rstrip().splitlines() if not line.startswith(" " * 12)]
    return _SIZE.sub("SIZE", _KERNEL.sub("KERNEL", "\n".join(lines)))


def unbound_names(text: str) -> set[str]:
    """The names that a block of Python uses and does not bind: its reader has no value for them."""
    block = symtable.symtable(text, "block", "exec")
    bound = {name.get_name() for name in block.get_symbols() if name.is_assigned() or name.is_imported()}
    used: set[str] = set()
    tables = [block]
    for table in tables:  # grows while it is read
        tables += table.get_children()
        used |= {name.get_name() for name in table.get_symbols() if name.is_global() or table is block}
    return used - bound - set(dir(builtins)) - {"__file__", "__name__"}


def commands() -> Iterator[tuple[str, str]]:
    """The lines of all bash blocks, each with its place; environment variables in front of a command are left out."""
    for fence in fences("bash"):
        for number, line in enumerate(fence.text.splitlines(), fence.line + 1):
            for command in line.split("&&"):
                words = command.strip().split()
                while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                    words.pop(0)
                if words:
                    yield f"{fence.page.relative_to(ROOT)}:{number}", " ".join(words)


def public_modules() -> list[ModuleType]:
    """scaledot, and what a public module has in `__all__`, if it is a module. scaledot.distributed is public too."""
    import scaledot

    found = [scaledot, scaledot.distributed]
    for module in found:  # grows while it is read
        members = [getattr(module, name) for name in module.__all__]
        found += [member for member in members if isinstance(member, ModuleType) and member not in found]
    return found


@contextlib.contextmanager
def contained(folder: Path) -> Iterator[None]:
    """Undoes what a block may do: write files, redirect F.sdpa, install flash_attn, start a process group, and set how
    tensors print.
    """
    import torch
    import torch.distributed as dist

    from scaledot.dropin import flash_attn, sdpa

    before: Any = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        torch.set_printoptions(profile="default", sci_mode=None)
        for activation in sdpa._active:
            activation.deactivate()
        flash_attn.uninstall()
        if dist.is_initialized():
            dist.destroy_process_group()
