"""Where `out` cannot be served: under torch.vmap, whose samples share one call, and with DTensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from .dtensor import any_dtensor

__all__ = ["check_plain_out", "no_out_under_vmap", "refuse_out_under_vmap"]


def check_plain_out(out: Any, *tensors: Tensor) -> None:
    """Raises an error if one of them is a DTensor."""
    if any_dtensor(out, *tensors):
        raise NotImplementedError("out: got a tensor in a call with DTensors; needs None: copy the result to it")


def refuse_out_under_vmap(info: Any, in_dims: Any, *args: Any) -> NoReturn:
    """The rule of torch.vmap for an op with `out`."""
    raise NotImplementedError("out: got a tensor under torch.vmap; needs None: copy the result to it after torch.vmap")


def no_out_under_vmap(arguments: Mapping[str, Any]) -> None:
    """Raises an error for an explanation of a call with `out`."""
    if arguments.get("out") is not None:
        refuse_out_under_vmap(None, None)
