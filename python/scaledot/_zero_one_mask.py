"""A warning, given once, for a floating mask of zeros and ones: it was meant to be boolean."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ._warn import warn

__all__ = ["warn_of_zero_one_mask"]

# Floating masks whose values are still read. A model has the same kind of mask in each call, so the first are enough,
# and a long run pays nothing.
_unread = 8
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # others are an error that the op raises


def warn_of_zero_one_mask(mask: object) -> None:
    """Warns if a floating mask on the CPU has both 0 and 1, and no other value. A learnt one is not read."""
    global _unread
    if _unread == 0 or type(mask) is not Tensor or mask.dtype not in _DTYPES or mask.requires_grad:
        return
    if mask.device.type != "cpu" or mask.is_nested or mask.layout != torch.strided or mask.numel() < 2:
        return
    if is_in_torch_dispatch_mode() or torch._C._get_tracing_state() or _functorch.peek_interpreter_stack() is not None:
        return  # its values are not all here, or reading them would be recorded
    _unread -= 1
    least, largest = mask.aminmax()
    if least != 0 or largest != 1 or not ((mask == 0) | (mask == 1)).all():
        return
    _unread = 0
    warn(
        "attn_mask: got a floating mask of zeros and ones, which is added to the scores, so that 0 hides nothing; to "
        "hide the keys at 0, pass attn_mask.bool()"
    )
