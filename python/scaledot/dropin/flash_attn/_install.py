"""`import flash_attn` finds these functions where flash-attn is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ..._keywords import check_keywords

__all__ = ["VERSION", "install", "uninstall"]

VERSION = "2.8.3"
"""The version of flash-attn whose signatures these are."""

_ATTENTION = __name__.rpartition(".")[0]  # scaledot.dropin.flash_attn
_MODULES = {  # and the modules whose names they have
    "flash_attn": [_ATTENTION],
    "flash_attn.flash_attn_interface": [_ATTENTION, f"{_ATTENTION}._interface"],
    "flash_attn.bert_padding": [f"{_ATTENTION}.bert_padding"],
}
_OURS = frozenset(("VERSION", "bert_padding", "install", "uninstall"))  # names that flash-attn does not have
_FILES = {
    "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n",
    "top_level.txt": "flash_attn\n",
}


class _Distribution(Distribution):
    """The distribution that importlib.metadata finds as flash-attn. It has no files."""

    def read_text(self, filename: str) -> str | None:
        return _FILES.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class _Finder(DistributionFinder, Loader):
    """On sys.meta_path, it makes the modules of `_MODULES`."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=name == "flash_attn") if name in _MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        for source in map(importlib.import_module, _MODULES[module.__name__]):
            module.__doc__ = module.__doc__ or source.__doc__
            for name in source.__all__:
                if name not in _OURS:
                    setattr(module, name, getattr(source, name))
        if module.__name__ == "flash_attn":
            vars(module)["__version__"] = VERSION

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        name = None if context is None else context.name
        return [_Distribution()] if name is None or name.lower().replace("_", "-") == "flash-attn" else []


_finder = _Finder()


@check_keywords
def install() -> None:
    """Makes ``import flash_attn`` find scaledot's functions, for this process. May be called repeatedly.

    The modules are flash_attn, flash_attn.flash_attn_interface and flash_attn.bert_padding. importlib.metadata has
    flash-attn in the version `VERSION`. Call it before libraries that look for flash-attn are imported.

    transformers 5 takes "flash_attention_2" only where torch finds a GPU, so that it does not reach this on a CPU.
    ``scaledot.dropin.transformers`` does.

    Raises:
        RuntimeError: flash-attn itself is installed or imported.
    """
    if _finder in sys.meta_path:
        return
    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None:
        raise RuntimeError("flash_attn: got an installed flash-attn; needs an environment without it for install()")
    sys.meta_path.append(_finder)
    importlib.invalidate_caches()


@check_keywords
def uninstall() -> None:
    """Undoes :func:`install`. Modules that have imported flash_attn keep what they have."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
        for name in _MODULES:
            sys.modules.pop(name, None)
