// Products on the tile unit of AMX with rows of key and value that are read in place, kUnitKeys of them at a time.
//
//   S^T = K Q^T    a tile of K is 16 keys by 32 columns; Q is packed once
//   O = P V        the values of two neighbouring keys are interleaved, in registers and the first-level cache
// tile_unit.h has the terms.
#pragma once

#include "cpu/simd/tile_unit.h"

namespace scaledot {
namespace {

constexpr int64_t kUnitColumns = 2 * kUnitSide;  // of bfloat16
constexpr int64_t kUnitPairs = kUnitSide * kUnitSide;
constexpr int kKeyTiles = 4;
constexpr int64_t kUnitKeys = kKeyTiles * kUnitSide;  // that are multiplied at a time

// A tile of rows of P by kUnitKeys keys. Half of these keys are a depth of kUnitSide.
struct UnitWeights {
  Bf16Pair pairs[2][kUnitPairs];
};

// kUnitSide rows, `bytes` from each other.
struct UnitRows {
  const BFloat16* first;
  int64_t bytes;
};

// Columns of a row.
using UnitRow = Native<uint16_t>;
using LooseUnitRow = Loose<uint16_t, kUnitColumns>;
static_assert(kLanes<uint16_t> == kUnitColumns);

SCALEDOT_INLINE UnitRow load_columns(const BFloat16* from, int64_t available) {
  if (available >= kUnitColumns) return *reinterpret_cast<const LooseUnitRow*>(from);
  return first_elements<UnitRow>(from, available);
}

// kUnitColumns numbers of a row as Bf16Pairs.
SCALEDOT_INLINE void narrow_columns(const float* from, Bf16Pair* to) {
  OperandTraits<Bf16Pair>::store_along(to, 0, load(from));
  OperandTraits<Bf16Pair>::store_along(to, kUnitSide, load(from + kUnitSide));
}

// Packs rows of `width` columns that keys are to be multiplied with: a tile for each kUnitSide rows and kUnitColumns
// columns.
SCALEDOT_NOINLINE void pack_query_tiles(const float* rows, int64_t count, int64_t width, Bf16Pair* to) {
  for (int64_t r = 0; r < count; r += kUnitSide)
    for (int64_t d = 0; d < width; d += kUnitColumns, to += kUnitPairs) {
      Bf16Pair pairs[kUnitPairs] = {};
      for (int64_t i = 0; i < min<int64_t>(count - r, kUnitSide); ++i)
        narrow_columns(rows + (r + i) * width + d, pairs + i * kUnitSide);
      Vec<Bf16Pair> square[kUnitSide];
#pragma GCC unroll 16
      for (int i = 0; i < kUnitSide; ++i) square[i] = load(pairs + i * kUnitSide);
      transpose<float>(square);
#pragma GCC unroll 16
      for (int i = 0; i < kUnitSide; ++i) store(to + i * kUnitSide, square[i]);
    }
}

// sums[i] = kUnitSide keys of tile i x kUnitSide packed rows. keys(i, d): the keys' columns from d on, as UnitRows.
// between(i, d) is called after their product.
template <class Keys, class Between>
SCALEDOT_NOINLINE void multiply_keys(const Keys& keys, int64_t width, const Bf16Pair* query,
                                     float (&sums)[kKeyTiles][kUnitPairs], Between& between) {
  static_assert(kKeyTiles == 4);
  __asm__ volatile("" ::: "memory");  // as in tile_unit.h
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < width; d += kUnitColumns, query += kUnitPairs) {
    const UnitRows k0 = keys(0, d), k1 = keys(1, d), k2 = keys(2, d), k3 = keys(3, d);
    _tile_loadd(4, query, kUnitRowBytes);
    _tile_loadd(5, k0.first, k0.bytes);
    _tile_dpbf16ps(0, 5, 4);
    between(0, d);
    _tile_loadd(6, k1.first, k1.bytes);
    _tile_dpbf16ps(1, 6, 4);
    between(1, d);
    _tile_loadd(7, k2.first, k2.bytes);
    _tile_dpbf16ps(2, 7, 4);
    between(2, d);
    _tile_loadd(5, k3.first, k3.bytes);
    _tile_dpbf16ps(3, 5, 4);
    between(3, d);
  }
  _tile_stored(0, sums[0], kUnitRowBytes);
  _tile_stored(1, sums[1], kUnitRowBytes);
  _tile_stored(2, sums[2], kUnitRowBytes);
  _tile_stored(3, sums[3], kUnitRowBytes);
  __asm__ volatile("" ::: "memory");
}

// Stores a tile of multiply_keys as scores of `rows` rows, `stride` apart.
SCALEDOT_INLINE void store_score_tile(const float* sums, int64_t rows, float* scores, int64_t stride) {
  Vec<float> square[kUnitSide];
#pragma GCC unroll 16
  for (int i = 0; i < kUnitSide; ++i) square[i] = load(sums + i * kUnitSide);
  transpose<float>(square);
#pragma GCC unroll 16
  for (int i = 0; i < kUnitSide; ++i)
    if (i < rows) store(scores + i * stride, square[i]);
}

// Columns kFirst to kFirst + 3 of each eight of two rows: one instruction.
template <int kFirst>
SCALEDOT_INLINE UnitRow interleave(UnitRow a, UnitRow b) {
  UnitRow lanes;
#pragma GCC unroll 32
  for (int l = 0; l < kUnitColumns; ++l)
    lanes[l] = uint16_t(l / 8 * 8 + kFirst + l % 8 / 2 + (l % 2 ? kUnitColumns : 0));
  return shuffle(a, b, lanes);
}

// A Bf16Pair of each two of kUnitSide rows, in the columns from `d` on: the first half of each eight columns, and the
// second. `offset`: of the column d = 0.
SCALEDOT_INLINE void interleave_values(const BFloat16* const* rows, int64_t offset, int64_t d, int64_t cols,
                                       Bf16Pair* first_half, Bf16Pair* second_half) {
  const auto interleave_rows = [&](const auto& row) {
#pragma GCC unroll 8
    for (int k = 0; k < kUnitSide; k += 2) {
      const UnitRow a = row(rows[k] + offset + d), b = row(rows[k + 1] + offset + d);
      *reinterpret_cast<LooseUnitRow*>(first_half + k / 2 * kUnitSide) = interleave<0>(a, b);
      *reinterpret_cast<LooseUnitRow*>(second_half + k / 2 * kUnitSide) = interleave<4>(a, b);
    }
  };
  if (d + kUnitColumns <= cols)
    interleave_rows([](const BFloat16* x) { return *reinterpret_cast<const LooseUnitRow*>(x); });
  else
    interleave_rows([&](const BFloat16* x) { return first_elements<UnitRow>(x, cols - d); });
}

// sums += P V for a block of kUnitColumns columns, in the order of interleave_values. Row tiles are kUnitSide rows
// apart. weights[row tile], values[half of the keys][half of the columns].
template <int kRowTiles>
SCALEDOT_NOINLINE void multiply_values(const UnitWeights* weights, const Bf16Pair (&values)[2][2][kUnitPairs],
                                       float* sums, int64_t width) {
  const int64_t bytes = width * int64_t(sizeof(float));
  float* const lower = sums + kUnitSide * width;
  __asm__ volatile("" ::: "memory");  // as in tile_unit.h
  _tile_loadd(0, sums, bytes);
  _tile_loadd(1, sums + kUnitSide, bytes);
  if constexpr (kRowTiles == 2) {
    _tile_loadd(2, lower, bytes);
    _tile_loadd(3, lower + kUnitSide, bytes);
  }
  for (int half = 0; half < 2; ++half) {
    _tile_loadd(4, weights[0].pairs[half], kUnitRowBytes);
    _tile_loadd(6, values[half][0], kUnitRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, values[half][1], kUnitRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kRowTiles == 2) {
      _tile_loadd(5, weights[1].pairs[half], kUnitRowBytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, bytes);
  _tile_stored(1, sums + kUnitSide, bytes);
  if constexpr (kRowTiles == 2) {
    _tile_stored(2, lower, bytes);
    _tile_stored(3, lower + kUnitSide, bytes);
  }
  __asm__ volatile("" ::: "memory");
}

// Brings the columns of a block from the order of interleave_values to their own.
inline void order_columns(float* block) {
  float columns[kUnitColumns];
  __builtin_memcpy(columns, block, sizeof(columns));
  for (int c = 0; c < kUnitColumns; ++c) block[c] = columns[c % 8 / 4 * kUnitSide + c / 8 * 4 + c % 4];
}

}  // namespace
}  // namespace scaledot
