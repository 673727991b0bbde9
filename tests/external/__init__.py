"""The suites of torch, ONNX and flash-attn, run against scaledot, and CUTLASS's layouts: `bash tests/external/run`.

Each module defines SUITE, its name, and CHECKS, functions that count their cases in a Tally. The cases of torch and
ONNX come from the installed packages; none is copied. Those of flash-attn and of FlexAttention, whose tests need a GPU,
are written anew.
CUTLASS is no suite: its headers are the oracle for layouts.
"""

from importlib import import_module
from types import ModuleType


def suites() -> list[ModuleType]:
    """The modules are imported on demand, because each needs the package it tests."""
    names = ("op_info", "module_info", "onnx_attention", "flash_attn", "flex_attention", "cutlass")
    return [import_module(f"{__name__}.{name}") for name in names]
