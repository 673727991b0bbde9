"""BlockMask: which keys the rows may attend to, by blocks of rows and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._captured import Captured
from ._checks import check_device, described, integer, require_tensors
from ._keywords import check_constructor, check_keywords

__all__ = ["BlockMask", "block_arguments"]

_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")  # of torch's BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# (entries, rows, keys): bool (N, block_rows, block_keys), for blocks of entries of the grid's leading dimensions. Rows
# (N, block_rows) and keys (N, block_keys) past the last one repeat it.
_Shown = Callable[[Tensor, Tensor, Tensor], Tensor]

_EMPTY, _FULL = -2, -1  # as in csrc/core/block_mask.h
_WORD = 64  # bits
_ELEMENTS = 1 << 22  # of blocks that are looked at together
_CONVERTED = "_scaledot_block_mask"  # an attribute of torch's BlockMask: the converted one, and its sources


@check_constructor
@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which keys the rows may attend to, by blocks. Pass it as `block_mask`.

    A block is empty, full or partial. Empty blocks cost nothing, full blocks cost what they cost without a mask, and
    partial blocks have one bit for each of their elements. Make one with :meth:`from_dense`, :meth:`from_mask_mod` or
    :meth:`from_torch`, once, and use it in any number of calls.

    Attributes:
        blocks: int32 (..., row blocks, key blocks): -2 for an empty block, -1 for a full one, n >= 0 for a partial one
            with the bits ``bits[n]``. The dimensions in front broadcast to (batch..., heads).
        bits: int64 (partial blocks, block_size[0], words): bit k % 64 of word k // 64 is key k of the block.
        block_size: (rows, keys) of a block, at most `lengths`.
        lengths: (Lq, Lk), the lengths of query and key that the mask is for.

    A mask that torch.save wrote is loaded by torch.load(weights_only=True) after `import scaledot`.
    """

    blocks: Tensor
    bits: Tensor
    block_size: tuple[int, int]
    lengths: tuple[int, int]

    @classmethod
    @check_keywords
    def from_torch(cls, block_mask: Any) -> BlockMask:
        """Converts a ``torch.nn.attention.flex_attention.BlockMask`` with any block sizes.

        Its `mask_mod` is evaluated here, in its partial blocks only. The result is stored with `block_mask`, and a
        further call returns it. If a list of blocks has changed since, the mask is converted anew. If only `mask_mod`
        was replaced, or something that it reads has changed, `mask_mod` is evaluated in all blocks, as torch's
        uncompiled flex_attention does in every call. Compiled code looks for no change: make a new mask there.

        Raises:
            TypeError: `block_mask` is something else.
        """
        if isinstance(block_mask, BlockMask):
            return block_mask
        if not hasattr(block_mask, "kv_num_blocks"):
            needs = "a scaledot.BlockMask or a torch.nn.attention.flex_attention.BlockMask"
            if callable(block_mask):
                needs += ": scaledot.BlockMask.from_mask_mod(mask_mod, B, H, Lq, Lk) makes one of a function"
            raise TypeError(f"block_mask: got {described(block_mask)}; needs {needs}")
        found: _Converted | None = getattr(block_mask, _CONVERTED, None)
        if torch.compiler.is_compiling():
            if found is None:  # without fullgraph=True, torch then runs this call uncompiled
                raise RuntimeError(
                    "block_mask: got one of torch's in compiled code; needs a scaledot.BlockMask, or one that "
                    "scaledot.BlockMask.from_torch converted before"
                )
            return found.mask
        lists = [t for name in _LISTS if (t := getattr(block_mask, name)) is not None]
        if found is None or not found.lists.is_current(*lists):
            found = _Converted(_convert(block_mask), Captured(*lists), Captured(block_mask.mask_mod))
        elif not found.mask_mod.is_current(block_mask.mask_mod):
            mask, heads = found.mask, block_mask.kv_num_blocks.shape[1]
            grid = torch.zeros_like(mask.blocks)
            mask = _build(grid, mask.block_size, mask.lengths, _evaluated(block_mask.mask_mod, heads))
            found = _Converted(mask, found.lists, Captured(block_mask.mask_mod))
        else:
            return found.mask
        setattr(block_mask, _CONVERTED, found)
        return found.mask

    @classmethod
    @check_keywords
    def from_dense(cls, mask: Tensor, block_size: int | tuple[int, int] = 128) -> BlockMask:
        """The block mask of a boolean mask.

        Args:
            mask: bool (..., Lq, Lk), True = may attend. The dimensions in front broadcast to (batch..., heads).
            block_size: of rows and of keys, or (rows, keys); at least 1.

        Raises:
            TypeError: `mask` is not a boolean tensor, or `block_size` not an integer or a pair of integers.
            ValueError: `mask` has fewer than 2 dimensions, or `block_size` is below 1.
        """
        require_tensors(mask=mask)
        if mask.dtype != torch.bool:
            raise TypeError(f"mask: got dtype {mask.dtype}; needs torch.bool (True = may attend)")
        if mask.dim() < 2:
            raise ValueError(f"mask: got shape {tuple(mask.shape)}; needs (..., Lq, Lk)")
        lengths = (mask.shape[-2], mask.shape[-1])
        size = _block_size(block_size, lengths)
        entries = mask.reshape(-1, *lengths) if mask.numel() else mask.new_zeros(1, *lengths)

        def shown(entry: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
            return entries[entry[:, None, None], rows[:, :, None], keys[:, None, :]]

        return _build(_grid(mask.shape[:-2], size, lengths, mask.device), size, lengths, shown)

    @classmethod
    @check_keywords
    def from_mask_mod(
        cls,
        mask_mod: MaskMod,
        B: int | None,
        H: int | None,
        Lq: int,
        Lk: int,
        block_size: int | tuple[int, int] = 128,
        *,
        device: torch.device | str | int | None = None,
    ) -> BlockMask:
        """The block mask of a function, as torch's ``create_block_mask`` takes it.

        Args:
            mask_mod: called with the 0-d integer tensors (batch entry, head, row, key) under torch.vmap; returns a
                boolean tensor, True = may attend. It is called here only.
            B: batch entries; 1 or None if they all have the same mask.
            H: query heads; 1 or None if they all have the same mask.
            Lq: length of query.
            Lk: length of key.
            block_size: of rows and of keys, or (rows, keys); at least 1.
            device: of the mask, and of the tensors that `mask_mod` is called with; default the CPU.

        The mask is looked at block by block, so no tensor of Lq * Lk elements is made.

        Raises:
            TypeError: an argument of a wrong type; a `mask_mod` that does not return booleans.
            ValueError: a size that is too small.
        """
        if not callable(mask_mod):
            raise TypeError(f"mask_mod: got {described(mask_mod)}; needs a function of (batch, head, row, key)")
        lead = (1 if B is None else integer("B", B, least=0), 1 if H is None else integer("H", H, least=0))
        lengths = (integer("Lq", Lq, least=0), integer("Lk", Lk, least=0))
        size = _block_size(block_size, lengths)
        grid = _grid(lead, size, lengths, torch.device("cpu" if device is None else device))
        return _build(grid, size, lengths, _evaluated(mask_mod, lead[1]))

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., Lq, Lk)"""
        return (*self.blocks.shape[:-2], *self.lengths)

    @property
    def device(self) -> torch.device:
        """Where the mask is."""
        return self.blocks.device

    @check_keywords
    def sparsity(self) -> float:
        """The percentage of blocks that are empty, as torch's BlockMask counts it."""
        empty = int((self.blocks == _EMPTY).sum())
        return 100.0 * empty / max(self.blocks.numel(), 1)

    @check_keywords
    def to_dense(self) -> Tensor:
        """The boolean mask (..., Lq, Lk), True = may attend."""
        rows, keys = self.block_size
        shown = _unpacked(self.bits)[..., :keys]
        kinds = torch.tensor([False, True], device=self.device)[:, None, None].expand(2, rows, keys)
        found = torch.cat([kinds, shown])[self.blocks.long() - _EMPTY]  # (..., row blocks, key blocks, rows, keys)
        whole = found.transpose(-3, -2).flatten(-2).flatten(-3, -2)
        return whole[..., : self.lengths[0], : self.lengths[1]]

    @check_keywords
    def to(self, device: torch.device | str | int) -> BlockMask:
        """The mask on another device."""
        check_device("device", device)
        return BlockMask(self.blocks.to(device), self.bits.to(device), self.block_size, self.lengths)

    def __repr__(self) -> str:
        return f"BlockMask(shape={self.shape}, block_size={self.block_size}, sparsity={self.sparsity():.2f}%)"


# Only tensors and numbers are stored of its attributes.
torch.serialization.add_safe_globals([BlockMask])


class _Converted(NamedTuple):
    """A mask of torch's, and what it was made from."""

    mask: BlockMask
    lists: Captured
    mask_mod: Captured


def block_arguments(block_mask: Any) -> dict[str, Any]:
    """The ops' arguments for a `block_mask`, ours or torch's."""
    mask = block_mask if isinstance(block_mask, BlockMask) else BlockMask.from_torch(block_mask)
    return {"blocks": mask.blocks, "block_bits": mask.bits, "block_shape": [*mask.block_size, *mask.lengths]}


# ------------------------------------------------------------------------------------------------ arguments
def _block_size(size: int | tuple[int, int], lengths: tuple[int, int]) -> tuple[int, int]:
    """(rows, keys) of a block; at most the lengths, so that no bits are stored beyond them."""
    sizes = size if isinstance(size, (tuple, list)) else (size, size)
    if len(sizes) != 2:
        raise TypeError(f"block_size: got {described(size)}; needs an integer, or a pair (rows, keys)")
    rows, keys = (min(integer("block_size", s, least=1), max(n, 1)) for s, n in zip(sizes, lengths, strict=True))
    return rows, keys


# ------------------------------------------------------------------------------------------------ blocks
def _grid(lead: Any, size: tuple[int, int], lengths: tuple[int, int], device: torch.device) -> Tensor:
    """(..., row blocks, key blocks), zeros: any block may be partial."""
    blocks = [-(-length // one) for length, one in zip(lengths, size, strict=True)]
    return torch.zeros(*lead, *blocks, dtype=torch.int32, device=device)


def _build(grid: Tensor, size: tuple[int, int], lengths: tuple[int, int], shown: _Shown) -> BlockMask:
    """The mask whose blocks are those of `grid`; where it is 0, what `shown` makes of them."""
    blocks = grid.flatten(0, -3) if grid.dim() > 2 else grid[None]
    partial = 0
    bits = [torch.zeros(0, size[0], -(-size[1] // _WORD), dtype=torch.int64, device=grid.device)]
    for entry, m, n in _some_blocks(blocks, size[0] * size[1]):
        rows, rows_exist = _positions(m, size[0], lengths[0])
        keys, keys_exist = _positions(n, size[1], lengths[1])
        exists = rows_exist[:, :, None] & keys_exist[:, None, :]
        found = shown(entry, rows, keys) & exists
        some, every = found.flatten(1).any(-1), (found == exists).flatten(1).all(-1)
        mixed = some & ~every
        numbers = partial - 1 + mixed.cumsum(0)
        kinds = torch.where(every, _FULL, _EMPTY)
        blocks[entry, m, n] = torch.where(mixed, numbers, kinds).int()
        partial += int(mixed.sum())
        bits.append(_packed(found[mixed]))
    return BlockMask(blocks.view(grid.shape), torch.cat(bits), size, lengths)


def _some_blocks(blocks: Tensor, elements: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The (entry, row block, key block) numbers of the blocks that may be partial, some at a time."""
    places = (blocks == 0).nonzero()
    step = max(_ELEMENTS // elements, 1)
    for first in range(0, len(places), step):
        entry, m, n = places[first : first + step].unbind(-1)
        yield entry, m, n


def _positions(block: Tensor, size: int, length: int) -> tuple[Tensor, Tensor]:
    """The rows (or keys) of blocks, (N, size), and which of them exist; the others repeat the last."""
    at = block[:, None] * size + torch.arange(size, device=block.device)
    return at.clamp(max=max(length - 1, 0)), at < length


def _packed(shown: Tensor) -> Tensor:
    """(N, rows, keys) bool -> (N, rows, words) int64"""
    words = -(-shown.shape[-1] // _WORD)
    whole = torch.nn.functional.pad(shown.byte(), (0, words * _WORD - shown.shape[-1]))
    shifts = torch.arange(8, dtype=torch.uint8, device=shown.device)
    octets = (whole.unflatten(-1, (words * 8, 8)) << shifts).sum(-1, dtype=torch.uint8)
    return octets.contiguous().view(torch.int64)


def _unpacked(bits: Tensor) -> Tensor:
    """(N, rows, words) int64 -> (N, rows, 64 * words) bool"""
    shifts = torch.arange(_WORD, device=bits.device)
    return ((bits[..., None] >> shifts) & 1).bool().flatten(-2)


# ------------------------------------------------------------------------------------------------ functions
def _evaluated(mask_mod: MaskMod, heads: int) -> _Shown:
    """The scores that a mask_mod allows in blocks of (batch, head) entries."""

    def shown(entry: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import create_mask  # it takes long to import

        batch, head = entry // max(heads, 1), entry % max(heads, 1)

        def of_block(block: Tensor, _: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return mask_mod(batch[block], head[block], rows[block, row], keys[block, key])

        sizes = (len(entry), 1, rows.shape[-1], keys.shape[-1])
        found = create_mask(of_block, *sizes, device=entry.device)
        if not isinstance(found, Tensor) or found.dtype != torch.bool:
            raise TypeError(f"mask_mod: got one that returns {getattr(found, 'dtype', found)}; needs torch.bool")
        return found.expand(sizes)[:, 0]

    return shown


def _convert(block_mask: Any) -> BlockMask:
    """BlockMask.from_torch, made anew."""
    lengths = (int(block_mask.seq_lengths[0]), int(block_mask.seq_lengths[1]))
    size = _block_size(tuple(map(int, block_mask.BLOCK_SIZE)), lengths)  # type: ignore[arg-type]
    lead = block_mask.kv_num_blocks.shape[:-1]
    grid = _grid(lead, size, lengths, block_mask.kv_num_blocks.device)
    if block_mask.kv_num_blocks.shape[-1] < grid.shape[-2]:
        raise ValueError(
            f"block_mask: got {block_mask.kv_num_blocks.shape[-1]} blocks of {size[0]} rows; needs {grid.shape[-2]} "
            f"for {lengths[0]} rows"
        )
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, grid)
    grid.fill_(_EMPTY).masked_fill_(partial, 0)
    if block_mask.full_kv_num_blocks is not None:
        grid.masked_fill_(_listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, grid), _FULL)
    heads = grid.shape[-3] if grid.dim() > 2 else 1
    return _build(grid, size, lengths, _evaluated(block_mask.mask_mod, heads))


def _listed(counts: Tensor, indices: Tensor, grid: Tensor) -> Tensor:
    """Which blocks torch's lists name: of `indices` (..., row blocks, places) the first `counts` of each row."""
    rows, columns = grid.shape[-2:]
    counts, indices = counts[..., :rows], indices[..., :rows, :].long()
    named = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    inside = named & (indices < columns)
    marks = torch.zeros(*grid.shape[:-1], columns + 1, dtype=torch.bool, device=grid.device)
    return marks.scatter_(-1, torch.where(inside, indices, columns), True)[..., :columns]
