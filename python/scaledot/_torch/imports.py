"""Registration with parts of torch that `import scaledot` leaves alone."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["after_import"]


def after_import(module: str, action: Callable[[], None]) -> None:
    """Calls `action` as soon as the module is imported; at once if it has been.

    It may be called twice when two threads import at the same time.
    """
    finder = _Finder(module, action)
    sys.meta_path.insert(0, finder)
    if module in sys.modules:
        finder.remove()
        action()


class _Finder(MetaPathFinder):
    """Finds one module, once, as the other finders do, and gives it a loader that calls `action` at the end."""

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self.module, self.action = module, action

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.module or not self.remove():
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.action)
        return spec

    def remove(self) -> bool:
        """Whether this call removed it from sys.meta_path."""
        try:
            sys.meta_path.remove(self)
        except ValueError:
            return False
        return True


class _Loader(Loader):
    def __init__(self, loader: Loader, action: Callable[[], None]) -> None:
        self.loader, self.action = loader, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self.loader  # for inspect, pickle and the like
        self.loader.exec_module(module)
        self.action()
