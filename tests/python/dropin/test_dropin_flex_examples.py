"""The examples of the attention-gym repository, through dropin.flex_attention.

They are written anew from https://github.com/meta-pytorch/attention-gym (attn_gym/masks, attn_gym/mods): those that
have only a mask_mod, and those whose score_mod scaledot has. Its latent attention has another score_mod.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import and_masks, create_block_mask, noop_mask, or_masks

import reference
from scaledot.dropin.flex_attention import flex_attention
from scaledot.score_mods import alibi, softcap

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

HEADS, LENGTH = 4, 64
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
    bits = (index[..., None] >> torch.arange(6)) & 1
    places = 2 ** torch.arange(3)
    return (bits[..., 0::2] * places).sum(-1), (bits[..., 1::2] * places).sum(-1)


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
CAUSAL = [name for name in MASKS if name.startswith(("causal", "sliding window"))]
# The score_mods as the examples write them, and as scaledot makes them. ALiBi's is slope * (j - i), and scaledot's
# -slope * |i - j|: they are the same where later keys are hidden.
SCORE_MODS: dict[str, tuple[Any, Any]] = {
    "none": (None, None),
    "ALiBi": (
        lambda score, b, h, i, j: score + (j - i) * torch.exp2(-((h + 1) * 8.0 / HEADS)),
        alibi(torch.exp2(-(torch.arange(HEADS, dtype=torch.float64) + 1) * 8.0 / HEADS)),
    ),
    "softcap": (lambda score, b, h, i, j: 2 * torch.tanh(score / 2), softcap(2.0)),
}


EXAMPLES = [(mask, name) for mask in MASKS for name in SCORE_MODS if name != "ALiBi" or mask in CAUSAL]


@pytest.mark.parametrize(("mask", "score_mod"), EXAMPLES)
def test_an_example(mask: str, score_mod: str) -> None:
    """torch's eager flex_attention in float64 gives the same, and the formula the same gradients."""
    torch.manual_seed(0)
    leaves = [torch.randn(2, HEADS, LENGTH, 8, dtype=torch.float64) for _ in range(3)]
    block_mask = create_block_mask(MASKS[mask], None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
    of_example, ours = SCORE_MODS[score_mod]
    wanted = theirs.flex_attention(*leaves, of_example, block_mask)

    for leaf in leaves:
        leaf.requires_grad_()
    found = flex_attention(*leaves, ours, block_mask)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)

    dense = theirs.create_mask(MASKS[mask], 1, 1, LENGTH, LENGTH, device="cpu")
    options = {"ALiBi": {"alibi_slopes": torch.exp2(-(torch.arange(HEADS) + 1.0) * 2)}, "softcap": {"softcap": 2.0}}
    exact = reference.attention(*leaves, attn_mask=dense, **options.get(score_mod, {}))[0]
    torch.testing.assert_close(exact, wanted, rtol=1e-6, atol=1e-6)
    grad = torch.randn_like(found)
    for mine, right in zip(*(torch.autograd.grad(out, leaves, grad) for out in (found, exact)), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)
