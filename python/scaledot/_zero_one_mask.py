"""A warning, once for each line of the user's code, for a floating mask of zeros and ones, meant to be boolean."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ._warn import users_frame, warn

__all__ = ["warn_of_zero_one_mask"]

# A line of a model has the same kind of mask in each call, so its first are enough. Finding the line takes
# microseconds, so this ends too, and a long run pays nothing.
_unseen = 1000  # calls with a floating mask that are still looked at
_FIRST = 8
_read: dict[tuple[str, int], int] = {}  # by file and line, how many of its masks were read


def warn_of_zero_one_mask(mask: object) -> None:
    """Warns if a floating mask on the CPU has both 0 and 1, and no other value. A learnt one is not read.

    The mask is one that an op took, so that all of it is in memory.
    """
    global _unseen
    if _unseen == 0 or type(mask) is not Tensor or not mask.is_floating_point() or mask.requires_grad:
        return
    if mask.device.type != "cpu" or mask.is_nested or mask.layout != torch.strided or mask.numel() < 2:
        return
    if is_in_torch_dispatch_mode() or torch._C._get_tracing_state() or _functorch.peek_interpreter_stack() is not None:
        return  # its values are not all here, or reading them would be recorded
    _unseen -= 1
    frame = users_frame()
    line = (frame.f_code.co_filename, frame.f_lineno)
    read = _read.get(line, 0)
    if read == _FIRST:
        return
    _read[line] = read + 1
    least, largest = mask.aminmax()
    if least != 0 or largest != 1 or not ((mask == 0) | (mask == 1)).all():
        return
    _read[line] = _FIRST
    warn(
        "attn_mask: got a floating mask of zeros and ones, which is added to the scores, so that 0 hides nothing; to "
        "hide the keys at 0, pass attn_mask.bool()"
    )
