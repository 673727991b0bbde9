"""Other people's suites, run against scaledot: `bash tests/external/run`.

Each module has a SUITE, its name, and CHECKS, functions that count into a tally. The cases come from an installed torch
and from onnx on PyPI; none is copied."""

from importlib import import_module
from types import ModuleType


def suites() -> list[ModuleType]:
    """Imported here and not above: each needs what it is about."""
    return [import_module(f"{__name__}.{name}") for name in ("op_info", "module_info", "onnx_attention")]
