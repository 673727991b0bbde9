"""Scaledot's ops: which take tensors, and which reach the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Records the names of the calls made inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "scaledot":
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        """The calls of the op, or of its form for calls that a gradient is recorded for."""
        return self.names.count(f"{name}.default") + self.names.count(f"{name}_recorded.default")


def tensor_ops() -> list[str]:
    """The names of the ops that take tensors."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("scaledot::")]
    return sorted(name for name in names if "Tensor " in str(op_of(name)._schema).split("->")[0])


def op_of(name: str) -> Any:
    return getattr(torch.ops.scaledot, name.removeprefix("scaledot::")).default
