"""The masks of the attention-gym repository, written anew from https://github.com/meta-pytorch/attention-gym.

They are in attn_gym/masks there. Each is for 64 rows and keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

LENGTH = 64
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Places = Callable[[Tensor], tuple[Tensor, ...]]


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def sliding_window(width: int) -> MaskMod:
    return and_masks(lambda b, h, i, j: i - j <= width, causal)


def sinks(width: int, count: int) -> MaskMod:
    return and_masks(or_masks(lambda b, h, i, j: i - j <= width, lambda b, h, i, j: j < count), causal)


def prefix(length: int) -> MaskMod:
    return or_masks(lambda b, h, i, j: j < length, causal)


def dilated(width: int, step: int) -> MaskMod:
    return lambda b, h, i, j: ((i - j).abs() <= width) & ((i - j).abs() % step == 0)


def of_documents(inner: MaskMod, lengths: list[int]) -> MaskMod:
    """The inner mask sees positions within the document."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    start = torch.tensor([0, *lengths]).cumsum(0)
    return lambda b, h, i, j: (ids[i] == ids[j]) & inner(b, h, i - start[ids[i]], j - start[ids[j]])


def batchified(inner: MaskMod, size: int) -> MaskMod:
    return lambda b, h, i, j: (i // size == j // size) & inner(b, h, i % size, j % size)


def neighbours(places: Places, canvas: tuple[int, ...], kernel: tuple[int, ...]) -> MaskMod:
    """NATTEN: the keys around each row on a canvas, with the centre clamped to it."""

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        allowed = j >= 0
        for row, key, size, width in zip(places(i), places(j), canvas, kernel, strict=True):
            centre = row.clamp(width // 2, size - 1 - width // 2)
            allowed = allowed & ((centre - key).abs() <= width // 2)
        return allowed

    return mask_mod


def row_major(index: Tensor) -> tuple[Tensor, ...]:
    return index // 8, index % 8


def tiled(index: Tensor) -> tuple[Tensor, ...]:
    """8 x 8 in tiles of 4 x 2."""
    tile, within = index // 8, index % 8
    return tile % 2 * 4 + within % 4, tile // 2 * 2 + within // 4


def morton(index: Tensor) -> tuple[Tensor, ...]:
    """The even bits of the index, and its odd bits."""
    row, column = index * 0, index * 0
    for k in range(3):
        row = row + ((index >> 2 * k & 1) << k)
        column = column + ((index >> 2 * k + 1 & 1) << k)
    return row, column


def tiles_of_a_video(index: Tensor) -> tuple[Tensor, ...]:
    """The tile of a position in a video of 3 frames of 4 x 4, in tiles of 1 x 2 x 2."""
    tile = index // 4
    return tile // 4, tile // 2 % 2, tile % 2


def sliding_tiles(text: int) -> MaskMod:
    """STA: a video and its text. Text attends to all, and every position attends to text."""
    video, canvas, kernel = 48, (3, 2, 2), (2, 1, 2)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = (i < video) & (j < video)
        for row, key, size, width in zip(tiles_of_a_video(i), tiles_of_a_video(j), canvas, kernel, strict=True):
            left, right = width // 2, width // 2 + width % 2 - 1
            centre = row.clamp(left, size - 1 - right)
            near = near & (key >= centre - left) & (key <= centre + right)
        shown = j < video + text
        return near | ((i < video) & (j >= video) & shown) | ((i >= video) & shown)

    return mask_mod


def spatial(prompt: int, frame: int) -> MaskMod:
    """Sparse VideoGen, with a prompt and a sink of one frame."""
    return lambda b, h, i, j: (i < prompt) | (j < prompt + frame) | ((i - j).abs() < 2 * frame)


def temporal(prompt: int, frame: int) -> MaskMod:
    return lambda b, h, i, j: (i < prompt) | (j < prompt) | (((i - prompt) % frame - (j - prompt) % frame).abs() < 2)


def images(intervals: list[tuple[int, int]]) -> MaskMod:
    """Flamingo: text attends to the images of its interval. Each image has 16 keys."""
    bounds = torch.tensor(intervals)
    return lambda b, h, i, j: (i >= bounds[j // 16, 0]) & (i < bounds[j // 16, 1])


MASKS: dict[str, MaskMod] = {
    "causal": causal,
    "sliding window": sliding_window(9),
    "sliding window with sinks": sinks(9, 4),
    "prefix": prefix(20),
    "dilated sliding window": dilated(12, 3),
    "documents": of_documents(noop_mask, [5, 23, 1, 35]),
    "causal documents": of_documents(causal, [5, 23, 1, 35]),
    "documents with a prefix": of_documents(prefix(4), [5, 23, 1, 35]),
    "batches": batchified(noop_mask, 24),
    "causal batches": batchified(causal, 24),
    "NATTEN": neighbours(row_major, (8, 8), (3, 5)),
    "tiled NATTEN": neighbours(tiled, (8, 8), (3, 5)),
    "Morton NATTEN": neighbours(morton, (8, 8), (3, 5)),
    "sliding tiles": sliding_tiles(10),
    "spatial heads": spatial(6, 10),
    "temporal heads": temporal(6, 10),
    "images": images([(0, 40), (3, 40), (40, 64), (10, 12)]),
}
