"""Runs a function when a module is imported for the first time, or at once if it has been imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["on_import"]


class _Finder(MetaPathFinder):
    """Finds one module, once, as the other finders do, and calls the function when it has been imported."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self.name, self.function = name, function

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name or not self.remove():
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                vars(loader).pop("exec_module")
                execute(module)
                self.function()

            vars(loader)["exec_module"] = execute_and_call
        return spec

    def remove(self) -> bool:
        """Whether this call removed it from sys.meta_path."""
        try:
            sys.meta_path.remove(self)
        except ValueError:
            return False
        return True


def on_import(name: str, function: Callable[[], None]) -> None:
    """Calls `function` after the import of module `name`. Two threads that import it at once may call it twice."""
    finder = _Finder(name, function)
    sys.meta_path.insert(0, finder)
    if name in sys.modules:
        finder.remove()
        function()
