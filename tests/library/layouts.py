"""Memory layouts of test tensors: every tensor is a view into a larger buffer, whose other elements are poison.

The poison is NaN, or in a boolean mask the opposite of most of its elements. A kernel that reads outside its tensor
gives a visibly wrong result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Elements of poison before and after a tensor. The odd number misaligns the first element.
GUARD = 67
ALIGNED_GUARD = 64

# name -> (order of the last three dimensions from outermost to innermost, stride of the innermost, gap after each row)
ORDERS: dict[str, tuple[tuple[int, int, int], int, int]] = {
    "contiguous": ((-3, -2, -1), 1, 0),
    "misaligned": ((-3, -2, -1), 1, 0),
    "padded": ((-3, -2, -1), 1, 5),
    "blhd": ((-2, -3, -1), 1, 3),
    "inner2": ((-3, -2, -1), 2, 1),
    "transposed": ((-3, -1, -2), 1, 2),
}
# name -> the dimension that has stride 0
EXPANDED = {"expanded_batch": -4, "expanded_heads": -3, "expanded_rows": -2, "expanded_cols": -1}
LAYOUTS = (*ORDERS, *EXPANDED)


def strides_of(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """Strides of a tensor of this shape in one of ORDERS."""
    order, step, gap = ORDERS[layout]
    dims = len(shape)
    outermost_first = [*range(dims - 3), *(d + dims for d in order if d + dims >= 0)]
    strides = [0] * dims
    for position, dim in enumerate(reversed(outermost_first)):
        strides[dim] = step
        step = step * shape[dim] + (gap if position == 0 else 0)
    return tuple(strides)


def poison_of(tensor: Tensor) -> Tensor:
    """The element that fills the buffer around this tensor."""
    if tensor.dtype == torch.bool:
        majority = bool(tensor.numel()) and bool(tensor.float().mean() > 0.5)
        return torch.tensor(not majority)
    return torch.tensor(math.nan, dtype=tensor.dtype)


def place(values: Tensor, layout: str = "contiguous") -> Tensor:
    """A tensor equal to `values`, with the named layout, in a poisoned buffer.

    Expanded layouts repeat the first slice of their dimension. Without that dimension they are "misaligned".
    """
    if layout in EXPANDED:
        dim = EXPANDED[layout]
        if values.dim() + dim < 0:
            return place(values, "misaligned")
        return place(values.narrow(dim, 0, min(1, values.size(dim))), "misaligned").expand(values.shape)
    strides = strides_of(values.shape, layout)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, strides, strict=True))
    guard = ALIGNED_GUARD if layout == "contiguous" else GUARD
    size = 2 * guard + max(extent, 0)
    buffer = poison_of(values).expand(size).clone()
    view = buffer.as_strided(values.shape, strides, guard)
    view.copy_(values)
    return view
