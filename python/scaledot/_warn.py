"""Warnings that name the line of the user's code, however deep in the package they arise."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

__all__ = ["users_frame", "warn"]

# Files of these folders, and Python's own import machinery, only pass calls on.
_INNER = (*(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__)), "<frozen ")


def users_frame() -> FrameType:
    """The innermost frame that is neither of scaledot nor of torch, for a function that scaledot calls."""
    frame = sys._getframe(2)
    outer: FrameType | None = frame.f_back
    while outer is not None and outer.f_code.co_filename.startswith(_INNER):
        outer = outer.f_back
    return outer or frame  # as in python -m scaledot


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """warnings.warn, at the line of `users_frame`."""
    frame = users_frame()
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    file, module = frame.f_code.co_filename, names.get("__name__")
    warnings.warn_explicit(message, category, file, frame.f_lineno, module, registry)
