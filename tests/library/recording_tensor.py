"""A tensor subclass for the tests of __torch_function__."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor


class RecordingTensor(Tensor):
    """Records every function call in `seen` and forwards it."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})
