// block_mask: which keys the rows may attend to, by blocks of rows and keys.
//
// Block (m, n) has the rows from m * block_rows on and the keys from n * block_keys on. Its number in `blocks` says
// what it is: kEmptyBlock, kFullBlock, or a partial block, which has bits. Kernels skip tiles of empty blocks, compute
// tiles of full blocks without a mask, and read bits only in the others. A tile and a block may have any sizes.
#pragma once

#include "core/range.h"

namespace scaledot {

enum : int32_t { kEmptyBlock = -2, kFullBlock = -1 };  // from 0 on: the number of the block's bits

SCALEDOT_FN bool has_blocks(const Problem& p) { return p.blocks.data != nullptr; }

// The blocks that contain the rows, or the keys.
SCALEDOT_FN Range blocks_of(Range elements, int64_t size) {
  return {elements.begin / size, ceil_div(elements.end, size)};
}

// `start`: of the (batch, head) in `blocks`. A number without bits counts as an empty block: on a GPU nobody checks it.
SCALEDOT_FN int32_t block_number(const Problem& p, int64_t start, int64_t m, int64_t n) {
  const int64_t at = start + m * p.blocks.row_stride + n * p.blocks.col_stride;
  const int32_t number = static_cast<const int32_t*>(p.blocks.data)[at];
  return number >= kFullBlock && number < p.block_bits.count ? number : int32_t(kEmptyBlock);
}

// The bits of row i in a partial block: bit k % 64 of word k / 64 is key k of the block.
SCALEDOT_FN const uint64_t* block_row(const Problem& p, int32_t number, int64_t i) {
  return p.block_bits.words + (number * p.block_rows + i % p.block_rows) * ceil_div(p.block_keys, 64);
}

// ---------------------------------------------------------------------------------------------------- tiles
// The kind of the tile of these rows and keys, in all of these heads, by the block mask alone.
SCALEDOT_FN TileKind block_tile_kind(const Problem& p, int64_t batch, Range heads, Range rows, Range keys) {
  if (!has_blocks(p)) return TileKind::full;
  const Range down = blocks_of(rows, p.block_rows), across = blocks_of(keys, p.block_keys);
  const int64_t end = p.blocks.head_stride ? heads.end : heads.begin + 1;
  bool any = false, all = true;
  for (int64_t head = heads.begin; head < end; ++head) {
    const int64_t start = offset(p, p.blocks, batch, head);
    for (int64_t m = down.begin; m < down.end; ++m)
      for (int64_t n = across.begin; n < across.end; ++n) {
        const int32_t number = block_number(p, start, m, n);
        any |= number != kEmptyBlock;
        all &= number == kFullBlock;
        if (any && !all) return TileKind::partial;
      }
  }
  return any ? TileKind::full : TileKind::skip;
}

// Narrows these keys to those from the first to the last block that is not empty for these rows and heads.
SCALEDOT_FN Range block_keys_of(const Problem& p, int64_t batch, Range heads, Range rows, Range keys) {
  if (!has_blocks(p) || keys.begin >= keys.end) return keys;
  const int64_t size = p.block_keys;
  Range across = blocks_of(keys, size);
  while (across.begin < across.end &&
         block_tile_kind(p, batch, heads, rows, {across.begin * size, across.begin * size + 1}) == TileKind::skip)
    ++across.begin;
  if (across.begin == across.end) return {keys.begin, keys.begin};
  // The first block is known not to be empty.
  while (across.begin + 1 < across.end &&
         block_tile_kind(p, batch, heads, rows, {across.end * size - 1, across.end * size}) == TileKind::skip)
    --across.end;
  return intersect(keys, {across.begin * size, across.end * size});
}

// ---------------------------------------------------------------------------------------------------- keys
SCALEDOT_FN bool block_allows(const Problem& p, int64_t start, int64_t i, int64_t j) {
  const int32_t number = block_number(p, start, i / p.block_rows, j / p.block_keys);
  if (number < 0) return number == kFullBlock;
  const int64_t k = j % p.block_keys;
  return block_row(p, number, i)[k / 64] >> (k % 64) & 1;
}

// Bits [first, first + count) of a row of words; count is 1 to 64.
SCALEDOT_FN uint64_t bits_from(const uint64_t* words, int64_t first, int64_t count) {
  const int64_t from = first % 64;
  uint64_t bits = words[first / 64] >> from;
  if (from + count > 64) bits |= words[first / 64 + 1] << (64 - from);
  return bits & ~uint64_t(0) >> (64 - count);
}

// Which of at most 64 keys the block mask shows to row i: bit k belongs to key keys.begin + k.
SCALEDOT_FN uint64_t row_bits(const Problem& p, int64_t start, int64_t i, Range keys) {
  const int64_t m = i / p.block_rows;
  uint64_t shown = 0;
  for (int64_t begin = keys.begin; begin < keys.end;) {
    const int64_t n = begin / p.block_keys, end = min(keys.end, (n + 1) * p.block_keys), count = end - begin;
    const int32_t number = block_number(p, start, m, n);
    uint64_t bits = number == kFullBlock ? ~uint64_t(0) >> (64 - count) : 0;
    if (number >= 0) bits = bits_from(block_row(p, number, i), begin - n * p.block_keys, count);
    shown |= bits << (begin - keys.begin);
    begin = end;
  }
  return shown;
}

// Eight bits as eight bytes of 0 or 255.
SCALEDOT_FN uint64_t bits_as_bytes(uint64_t bits) {
  const uint64_t one_each = (bits * 0x0101010101010101u) & 0x8040201008040201u;
  return ((one_each + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u) * 255;
}

// Sets to 0 the states of the keys that the block mask hides from row i; state[k] belongs to key keys.begin + k.
SCALEDOT_FN void mask_by_blocks(const Problem& p, int64_t batch, int64_t head, int64_t i, Range keys, uint8_t* state) {
  const int64_t start = offset(p, p.blocks, batch, head);
  for (int64_t begin = keys.begin; begin < keys.end; begin += 64) {
    const int64_t count = min<int64_t>(keys.end - begin, 64);
    const uint64_t shown = row_bits(p, start, i, {begin, begin + count});
    for (int64_t k = 0; k < count; k += 8) {
      const int64_t bytes = min<int64_t>(count - k, 8);
      uint8_t* const to = state + (begin - keys.begin) + k;
      uint64_t states = 0;
      __builtin_memcpy(&states, to, size_t(bytes));
      states &= bits_as_bytes(shown >> k & 255);
      __builtin_memcpy(to, &states, size_t(bytes));
    }
  }
}

}  // namespace scaledot
