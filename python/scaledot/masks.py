"""Boolean attention masks: True = may attend.

Pass a mask as `attn_mask`; combine masks with ``&``. `is_causal` and `window` do the same as `causal_mask` and
`sliding_window_mask` without a mask in memory, so prefer them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ._checks import check_device, described, flag, integer, one_of, require_tensors
from ._keywords import check_keywords
from .options import Window, window_sides

__all__ = ["causal_mask", "document_mask", "padding_mask", "sliding_window_mask"]

Alignment = Literal["upper_left", "lower_right"]
Device = torch.device | str | int | None


@check_keywords
def causal_mask(
    query_length: int,
    key_length: int | None = None,
    *,
    causal_alignment: Alignment = "upper_left",
    device: Device = None,
) -> Tensor:
    """The causal mask: row i may attend to key j if distance(i, j) <= 0. Equivalent to ``is_causal=True``.

    Args:
        query_length: Lq, at least 0.
        key_length: Lk, at least 0; default Lq.
        causal_alignment: "upper_left" for distance(i, j) = j - i, or "lower_right" for
            distance(i, j) = j - (i + Lk - Lq).
        device: the device of the mask; default torch's default device.

    Returns:
        A bool tensor (Lq, Lk).

    Raises:
        TypeError: a length is not an integer.
        ValueError: a length is negative, or `causal_alignment` is neither of the two.

    Example:
        >>> scaledot.masks.causal_mask(2, 4, causal_alignment="lower_right").int()
        tensor([[1, 1, 1, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
    """
    return _distance(query_length, key_length, causal_alignment, device) <= 0


@check_keywords
def sliding_window_mask(
    query_length: int,
    key_length: int | None = None,
    *,
    window: Window,
    causal_alignment: Alignment = "upper_left",
    device: Device = None,
) -> Tensor:
    """The window mask: row i may attend to key j if -left <= distance(i, j) <= right.

    Equivalent to ``window=(left, right)``.

    Args:
        query_length: Lq, at least 0.
        key_length: Lk, at least 0; default Lq.
        window: (left, right), each at least 0, or None for no limit on that side.
        causal_alignment: "upper_left" for distance(i, j) = j - i, or "lower_right" for
            distance(i, j) = j - (i + Lk - Lq).
        device: the device of the mask; default torch's default device.

    Returns:
        A bool tensor (Lq, Lk).

    Raises:
        TypeError: a length is not an integer, or `window` is not a pair of integers or None.
        ValueError: a length or a side of the window is negative, or `causal_alignment` is neither of the two.

    Example:
        >>> scaledot.masks.sliding_window_mask(4, window=(1, 0)).int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [0, 1, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
    """
    left, right = window_sides(window)
    for name, side in (("left", left), ("right", right)):
        if side is not None and side < 0:
            raise ValueError(f"window: got a {name} side of {side}; needs at least 0, or None for no limit")
    distance = _distance(query_length, key_length, causal_alignment, device)
    mask = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        mask &= distance >= -left
    if right is not None:
        mask &= distance <= right
    return mask


@check_keywords
def padding_mask(
    lengths: Tensor | Sequence[int],
    key_length: int | None = None,
    *,
    padding_side: Literal["right", "left"] = "right",
    device: Device = None,
) -> Tensor:
    """The padding mask: all rows of sequence b may attend to its first (or last) `lengths[b]` keys only.

    Args:
        lengths: the number of real keys of each sequence, an integer tensor (B,) or a sequence of B integers.
        key_length: Lk, at least the largest length; default the largest length.
        padding_side: "right" if the real keys come first, "left" if they come last, as in prompts padded for
            generation.
        device: the device of the mask; default the device of `lengths` if that is a tensor, otherwise torch's default
            device.

    Returns:
        A bool tensor (B, 1, 1, Lk), which broadcasts over heads and rows. For the `key_mask` (B, Lk) of
        :class:`scaledot.MultiHeadAttention`, take ``mask[:, 0, 0]``.

    Raises:
        TypeError: `lengths` or `key_length` are not integers.
        ValueError: `lengths` is not one-dimensional, a length is negative or greater than `key_length`, or
            `padding_side` is neither "right" nor "left".

    Example:
        >>> scaledot.masks.padding_mask([1, 3])[:, 0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 1]], dtype=torch.int32)
    """
    check_device("device", device)
    if isinstance(lengths, (bool, str)):
        raise TypeError(f"lengths: got {described(lengths)}; needs a tensor or a sequence of integers")
    try:
        counts = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"lengths: got {described(lengths)}; needs a tensor or a sequence of integers") from error
    counts = counts if device is None else counts.to(device)
    if counts.dim() != 1:
        raise ValueError(f"lengths: got shape {tuple(counts.shape)}; needs (B,), one length per sequence")
    if counts.numel() == 0:
        counts = counts.to(torch.int64)  # an empty list makes a float tensor
    if counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool:
        raise TypeError(f"lengths: got dtype {counts.dtype}; needs integers")
    one_of("padding_side", padding_side, "right", "left")
    longest = int(counts.max()) if counts.numel() else 0
    if counts.numel() and int(counts.min()) < 0:
        raise ValueError(f"lengths: got {int(counts.min())}; needs at least 0")
    if key_length is None:
        key_length = longest
    elif (key_length := integer("key_length", key_length, least=0)) < longest:
        raise ValueError(f"key_length: got {key_length}; needs at least {longest}, the largest of lengths")
    position = torch.arange(key_length, device=counts.device)
    if padding_side == "left":
        position = key_length - 1 - position
    return (position < counts[:, None])[:, None, None, :]


@check_keywords
def document_mask(ids: Tensor, causal: bool = False) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """A mask_mod of documents packed into one row: two positions attend to each other where their ids are equal.

    Pass it to :meth:`scaledot.BlockMask.from_mask_mod`, or to torch's ``create_block_mask``. Both call it with the
    0-d integer tensors (batch entry, head, row, key).

    Args:
        ids: (B, L) or (L,), the number of the document that each position belongs to; on the device of the block mask.
        causal: a position attends to itself and earlier ones only.

    Returns:
        A function of (batch entry, head, row, key) that returns a boolean tensor, True = may attend.

    Raises:
        TypeError: `ids` is not a tensor of integers.
        ValueError: `ids` has other dimensions.

    Example:
        >>> ids = torch.arange(512) // 128
        >>> mask = scaledot.BlockMask.from_mask_mod(scaledot.masks.document_mask(ids), 1, 1, 512, 512)
        >>> mask.sparsity()
        75.0
    """
    require_tensors(ids=ids)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"ids: got dtype {ids.dtype}; needs integers")
    if ids.dim() not in (1, 2):
        raise ValueError(f"ids: got shape {tuple(ids.shape)}; needs (B, L) or (L,)")
    flag("causal", causal)

    def mask_mod(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        same = ids[row] == ids[key] if ids.dim() == 1 else ids[batch, row] == ids[batch, key]
        return same & (key <= row) if causal else same

    return mask_mod


def _distance(query_length: int, key_length: int | None, causal_alignment: Alignment, device: Device) -> Tensor:
    """(Lq, Lk): the distance from row i's position on the aligned diagonal to key j."""
    rows: int = integer("query_length", query_length, least=0)
    columns: int = rows if key_length is None else integer("key_length", key_length, least=0)
    one_of("causal_alignment", causal_alignment, "upper_left", "lower_right")
    check_device("device", device)
    diagonal = columns - rows if causal_alignment == "lower_right" else 0
    row = torch.arange(rows, device=device)[:, None] + diagonal
    return torch.arange(columns, device=device)[None, :] - row
