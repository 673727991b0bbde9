"""Boolean attention masks, True = may attend.

Each can be given as `attn_mask`, combined with others by `&`, and says the same as an option that needs no
mask in memory where there is one (`is_causal`, `window`): use the option where you can.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .options import Window, window_sides

__all__ = ["causal_mask", "padding_mask", "sliding_window_mask"]

Device = torch.device | str | int | None


def causal_mask(
    query_length: int,
    key_length: int | None = None,
    *,
    causal_alignment: str = "upper_left",
    device: Device = None,
) -> Tensor:
    """Row i may attend to key j if distance(i, j) <= 0; the same as ``is_causal=True``.

    Args:
        query_length: Lq, at least 0.
        key_length: Lk, at least 0; default Lq.
        causal_alignment: "upper_left": distance(i, j) = j - i. "lower_right": distance(i, j) = j - (i + Lk -
            Lq).
        device: where the mask is made; default torch's default device.

    Returns:
        (Lq, Lk), bool.

    Example:
        >>> scaledot.masks.causal_mask(2, 4, causal_alignment="lower_right").int()
        tensor([[1, 1, 1, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
    """
    return _distance(query_length, key_length, causal_alignment, device) <= 0


def sliding_window_mask(
    query_length: int,
    key_length: int | None = None,
    *,
    window: Window,
    causal_alignment: str = "upper_left",
    device: Device = None,
) -> Tensor:
    """Row i may attend to key j if -left <= distance(i, j) <= right; the same as ``window=(left, right)``.

    Args:
        query_length, key_length, causal_alignment, device: as for :func:`causal_mask`.
        window: (left, right), each at least 0, or None for no limit on that side.

    Returns:
        (Lq, Lk), bool.

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
            raise ValueError(f"window: its {name} side is {side}; needs at least 0, or None for no limit on that side")
    distance = _distance(query_length, key_length, causal_alignment, device)
    mask = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        mask &= distance >= -left
    if right is not None:
        mask &= distance <= right
    return mask


def padding_mask(
    lengths: Tensor | Sequence[int],
    key_length: int | None = None,
    *,
    padding_side: str = "right",
    device: Device = None,
) -> Tensor:
    """All rows of sequence b may attend to its `lengths[b]` real keys and not to its padding.

    Args:
        lengths: how many keys of each sequence are real: an integer tensor (B,) or a sequence of B integers.
        key_length: Lk, at least the largest length; default the largest length.
        padding_side: "right": the real keys come first. "left": they come last, as when prompts are padded
            for generation.
        device: where the mask is made; default the device of `lengths`, or torch's default device.

    Returns:
        (B, 1, 1, Lk), bool: broadcasts over heads and rows. ``mask[:, 0, 0]`` is the (B, Lk) that
        :class:`scaledot.MultiHeadAttention` takes as `key_mask`.

    Example:
        >>> scaledot.masks.padding_mask([1, 3])[:, 0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 1]], dtype=torch.int32)
    """
    counts = torch.as_tensor(lengths, device=device)
    if counts.dim() != 1:
        raise ValueError(f"lengths: got shape {tuple(counts.shape)}; needs one number for each sequence, (B,)")
    if counts.numel() == 0:
        counts = counts.to(torch.int64)  # an empty list makes a float tensor
    if counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool:
        raise TypeError(f"lengths: got dtype {counts.dtype}; needs integers")
    if padding_side not in ("right", "left"):
        raise ValueError(f'padding_side: got {padding_side!r}; needs "right" or "left"')
    longest = int(counts.max()) if counts.numel() else 0
    if counts.numel() and int(counts.min()) < 0:
        raise ValueError(f"lengths: got {int(counts.min())}; needs at least 0")
    if key_length is None:
        key_length = longest
    elif _length(key_length, "key_length") < longest:
        raise ValueError(f"key_length: got {key_length}; needs at least {longest}, the largest of lengths")
    position = torch.arange(key_length, device=counts.device)
    if padding_side == "left":
        position = key_length - 1 - position
    return (position < counts[:, None])[:, None, None, :]


def _distance(query_length: int, key_length: int | None, causal_alignment: str, device: Device) -> Tensor:
    """(Lq, Lk): how far each key is to the right of its row's place on the aligned diagonal."""
    rows = _length(query_length, "query_length")
    columns = rows if key_length is None else _length(key_length, "key_length")
    if causal_alignment not in ("upper_left", "lower_right"):
        raise ValueError(f'causal_alignment: got {causal_alignment!r}; needs "upper_left" or "lower_right"')
    diagonal = columns - rows if causal_alignment == "lower_right" else 0
    row = torch.arange(rows, device=device)[:, None] + diagonal
    return torch.arange(columns, device=device)[None, :] - row


def _length(length: int, name: str) -> int:
    if isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)):
        raise TypeError(f"{name}: got {length!r}, a {type(length).__name__}; needs an integer")
    if length < 0:
        raise ValueError(f"{name}: got {length}; needs at least 0")
    return length
