// The products of attention to lists of keys in bfloat16, on the tile unit of AMX (key_tiles.h). A call takes a whole
// list and all heads that share it. Each key is copied or interleaved once for all of them.
//
//   dots      S[r][e] = A[r] . B[k_e]            as S^T = B A^T: kUnitKeys keys at a time are copied side by side
//   weigh     C[r] = sum_e W[r][e] B[k_e]        W is rounded to bfloat16 for P V, and exact for dQ
//   scatter   C[k_e] += sum_r W[r][e] A[r]       high and low of W are a Bf16Pair, and A has each number twice
// Exact, W = high + low: high has the upper half of its bits, and low is the rest, as a bfloat16. So gradients are
// nearly as exact as products of floats, and no error grows with what keys have in common (shared_key.h).
#pragma once

#include "cpu/simd/attention/key_list_products.h"
#include "cpu/simd/attention/key_tiles.h"

namespace scaledot {
namespace {

class ListTileProducts {
 public:
  using Rows = ListedRows<BFloat16>;
  static constexpr int64_t kPiece = int64_t(1) << 32;  // a whole list
  static constexpr int64_t kQueries = kListTileQueries;

  // Bytes of scratch memory. `width`: columns, padded.
  static int64_t room(int64_t heads, int64_t width) {
    Arena arena = {nullptr, 0};
    lay_out(heads, width, arena);
    return arena.used;
  }
  ListTileProducts(int64_t heads, int64_t width, char* room) : s_(laid_out(heads, width, room)) {}

  // The products are those of ListProducts.
  void dots(const ListedKeys& list, const Rows& b, const float* a, int64_t rows, float* scores, int64_t stride) const {
    const int64_t width = padded<float>(b.cols), tiles = ceil_div(rows, int64_t(kUnitSide));
    pack_query_tiles(a, rows, width, s_.operand);
    const int64_t blocks = width / kUnitColumns, ahead = blocks_ahead(tiles, width), capacity = 2 * ahead;
    UnitKeys now(list, 0, b, s_.zeros);
    for (int64_t n = 0; n < ahead; ++n)
      for (int i = 0; i < kKeyTiles; ++i) copy_columns(now, i, n * kUnitColumns, b.cols, s_.copies[n]);
    for (int64_t e = 0, first = 0; e < list.count; e += kUnitKeys, first = (first + blocks) % capacity) {
      const UnitKeys next(list, e + kUnitKeys, b, s_.zeros);
      for (int64_t t = 0; t < tiles; ++t) {
        // Half of the copies are made while the tile unit multiplies the other half.
        const auto copy = [&](int i, int64_t d) {
          if (t > 0) return;
          const int64_t n = d / kUnitColumns + ahead;
          const UnitKeys& from = n < blocks ? now : next;
          copy_columns(from, i, (n < blocks ? n : n - blocks) * kUnitColumns, b.cols,
                       s_.copies[(first + n) % capacity]);
        };
        alignas(kCacheLine) float sums[kKeyTiles][kUnitPairs];
        const auto keys = [&](int i, int64_t d) {
          return UnitRows{s_.copies[(first + d / kUnitColumns) % capacity][i], kUnitRowBytes};
        };
        multiply_keys(keys, width, s_.operand + t * kUnitSide * width / 2, sums, copy);
        for (int i = 0; i < kKeyTiles && e + i * kUnitSide < list.count; ++i)
          store_score_tile(sums[i], min<int64_t>(rows - t * kUnitSide, kUnitSide),
                           scores + t * kUnitSide * stride + e + i * kUnitSide, stride);
      }
      now = next;
    }
  }

  // `exact`: with high and low of W, otherwise it is rounded.
  void weigh(const ListedKeys& list, const Rows& b, const float* weights, int64_t stride, int64_t rows, float* sums,
             bool exact) const {
    const int64_t width = padded<float>(b.cols), tiles = ceil_div(rows, int64_t(kUnitSide)) * (exact ? 2 : 1);
    clear_row(s_.sums, tiles * kUnitSide * width);
    // The values of a block are interleaved while the tile unit multiplies the block before.
    alignas(kCacheLine) Bf16Pair pairs[2][2][2][kUnitPairs];
    const auto interleave_block = [&](const UnitKeys& keys, int64_t d, Bf16Pair(&to)[2][2][kUnitPairs]) {
      for (int i = 0; i < kKeyTiles; ++i) {
        const int64_t first = i % 2 * (kUnitPairs / 2);
        interleave_values(keys.rows + i * kUnitSide, 0, d, b.cols, to[i / 2][0] + first, to[i / 2][1] + first);
      }
    };
    UnitKeys now(list, 0, b, s_.zeros);
    interleave_block(now, 0, pairs[0]);
    for (int64_t e = 0, block = 0; e < list.count; e += kUnitKeys) {
      const UnitKeys next(list, e + kUnitKeys, b, s_.zeros);
      for (int64_t r = 0; r < rows; r += kUnitSide)
        narrow_rows(weights + r * stride + e, stride, min<int64_t>(rows - r, kUnitSide), min(list.count - e, kUnitKeys),
                    exact, s_.weights + r / kUnitSide * (exact ? 2 : 1));
      for (int64_t d = 0; d < width; d += kUnitColumns, ++block) {
        const bool last = d + kUnitColumns == width;
        interleave_block(last ? next : now, last ? 0 : d + kUnitColumns, pairs[(block + 1) % 2]);
        int64_t t = 0;
        for (; t + 2 <= tiles; t += 2)
          multiply_values<2>(s_.weights + t, pairs[block % 2], s_.sums + t * kUnitSide * width + d, width);
        if (t < tiles) multiply_values<1>(s_.weights + t, pairs[block % 2], s_.sums + t * kUnitSide * width + d, width);
      }
      now = next;
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* const high = s_.sums + (r / kUnitSide * (exact ? 2 : 1) * kUnitSide + r % kUnitSide) * width;
      if (exact) add_row(high + kUnitSide * width, width, high);
      for (int64_t d = 0; d < width; d += kUnitColumns) order_columns(high + d);
      add_row(high, width, sums + r * width);
    }
  }

  void scatter(const ListedKeys& list, const float* weights, int64_t stride, const float* a, int64_t rows, int64_t cols,
               float* c) const {
    const int64_t width = padded<float>(cols), tiles = ceil_div(rows, int64_t(kUnitSide));
    pack_doubled(a, rows, width);
    for (int64_t e = 0; e < list.count; e += kUnitSide) {
      for (int64_t t = 0; t < tiles; ++t)
        transpose_weights(weights + t * kUnitSide * stride + e, stride, min<int64_t>(rows - t * kUnitSide, kUnitSide),
                          s_.weights[t].pairs[0]);
      for (int64_t d = 0; d < width; d += kScatterColumns) {
        alignas(kCacheLine) float sums[kUnitSide * kScatterColumns];
        const Bf16Pair* const operand = s_.operand + d * tiles * kUnitSide;
        d + kScatterColumns <= width ? multiply_columns<4>(s_.weights, tiles, operand, sums)
                                     : multiply_columns<2>(s_.weights, tiles, operand, sums);
        add_products(list, e, d, width, sums, c);
      }
    }
  }

  template <class T>
  static void prefetch(const ListedKeys&, const T*, int64_t, int64_t) {}  // copying and interleaving run ahead instead

 private:
  using KeyBlock = BFloat16[kKeyTiles][kUnitSide * kUnitColumns];  // kUnitColumns columns of kUnitKeys keys

  struct Scratch {
    Bf16Pair* operand;     // A: packed, or each number twice
    KeyBlock* copies;      // a circular buffer: the blocks that are multiplied, and the next
    BFloat16* zeros;       // (width): what stands for keys after the last
    UnitWeights* weights;  // (tile of heads, [high, low])
    float* sums;           // (tile of heads, [high, low], kUnitSide, width)
  };

  // Blocks of columns that are copied ahead. One tile of heads needs a block once; all copies then stay in the
  // first-level cache.
  static int64_t blocks_ahead(int64_t tiles, int64_t width) {
    return tiles == 1 ? min(kListCopiesAhead, width / kUnitColumns) : width / kUnitColumns;
  }

  static Scratch lay_out(int64_t heads, int64_t width, Arena& arena) {
    const int64_t tiles = ceil_div(heads, int64_t(kUnitSide));
    Scratch s;
    s.operand = take<Bf16Pair>(arena, tiles * kUnitSide * width);
    s.copies = take<KeyBlock>(arena, 2 * blocks_ahead(tiles, width));
    s.zeros = take<BFloat16>(arena, width);
    s.weights = take<UnitWeights>(arena, 2 * tiles);
    s.sums = take<float>(arena, 2 * tiles * kUnitSide * width);
    return s;
  }
  static Scratch laid_out(int64_t heads, int64_t width, char* room) {
    Arena arena = {room, 0};
    const Scratch s = lay_out(heads, width, arena);
    __builtin_memset(s.zeros, 0, size_t(width) * sizeof(BFloat16));
    return s;
  }

  // Where kUnitKeys keys of a list are. After the last key there are zeros.
  struct UnitKeys {
    const BFloat16* rows[kUnitKeys];

    UnitKeys(const ListedKeys& list, int64_t first, const Rows& b, const BFloat16* zeros) {
      for (int64_t k = 0; k < kUnitKeys; ++k) rows[k] = first + k < list.count ? b.row(list.keys[first + k]) : zeros;
    }
  };

  static SCALEDOT_INLINE void copy_columns(const UnitKeys& keys, int tile, int64_t d, int64_t cols, KeyBlock& copies) {
    const BFloat16* const* const from = keys.rows + tile * kUnitSide;
    const auto copy = [&](const auto& row) {
#pragma GCC unroll 16
      for (int k = 0; k < kUnitSide; ++k)
        *reinterpret_cast<LooseUnitRow*>(copies[tile] + k * kUnitColumns) = row(from[k] + d);
    };
    if (d + kUnitColumns <= cols)
      copy([](const BFloat16* x) { return *reinterpret_cast<const LooseUnitRow*>(x); });
    else
      copy([&](const BFloat16* x) { return first_elements<UnitRow>(x, cols - d); });
  }

  static constexpr int64_t kScatterColumns = 2 * kUnitColumns;  // of products at a time

  struct HighAndLow {
    Vec<float> high, low;
  };
  // The upper half of the bits of x, and what it leaves. Where x is not finite, low is 0.
  static SCALEDOT_INLINE HighAndLow high_and_low(Vec<float> x) {
    const Vec<float> high = upper_half(x);
    return {high, select(high - high == Vec<float>(0), x - high, Vec<float>(0))};
  }
  static SCALEDOT_INLINE Native<float> upper_half(Vec<float> x) {
    return Native<float>(Native<uint32_t>(x.v) & 0xffff0000u);
  }

  // The weights of a tile of heads for kUnitKeys keys, rounded; or high to to[0], low to to[1].
  static SCALEDOT_NOINLINE void narrow_rows(const float* weights, int64_t stride, int64_t rows, int64_t keys,
                                            bool exact, UnitWeights* to) {
    for (int64_t r = 0; r < kUnitSide; ++r)
#pragma GCC unroll 4
      for (int k = 0; k < kUnitKeys; k += kUnitSide) {
        Vec<float> x(0);
        if (r < rows && k < keys) x = load(weights + r * stride + k);
        if (k + kUnitSide > keys) x = select(lane_numbers<float>() < Vec<float>(float(keys - k)), x, Vec<float>(0));
        const int half = k / (2 * kUnitSide), column = k % (2 * kUnitSide);
        const HighAndLow both = exact ? high_and_low(x) : HighAndLow{x, x};
        OperandTraits<Bf16Pair>::store_along(to[0].pairs[half] + r * kUnitSide, column, both.high);
        if (exact) OperandTraits<Bf16Pair>::store_along(to[1].pairs[half] + r * kUnitSide, column, both.low);
      }
  }

  // The weights of a tile of heads for kUnitSide keys, transposed: Bf16Pairs of high and low.
  static SCALEDOT_NOINLINE void transpose_weights(const float* weights, int64_t stride, int64_t rows, Bf16Pair* to) {
    Vec<float> square[kUnitSide];
    for (int i = 0; i < kUnitSide; ++i) square[i] = i < rows ? load(weights + i * stride) : Vec<float>(0);
    transpose<float>(square);
    for (int i = 0; i < kUnitSide; ++i) {
      const HighAndLow both = high_and_low(square[i]);
      store(to + i * kUnitSide,
            Vec<Bf16Pair>(Native<uint32_t>(both.high.v) >> 16 | Native<uint32_t>(upper_half(both.low))));
    }
  }

  // Packs A with each number twice: a tile for each kUnitSide heads and columns.
  void pack_doubled(const float* a, int64_t rows, int64_t width) const {
    const int64_t all = round_up(rows, int64_t(kUnitSide));
    for (int64_t r = 0; r < all; ++r) {
      Bf16Pair* const to = s_.operand + r * kUnitSide;
      for (int64_t d = 0; d < width; d += kUnitSide) {
        const Vec<float> x = r < rows ? load(a + r * width + d) : Vec<float>(0);
        const Vec<float> twice[2] = {x, x};
        OperandTraits<Bf16Pair>::store_across(to + d * all, twice);
      }
    }
  }

  // C of the keys from entry e on += sums, the columns from d on. The next keys are prefetched.
  static void add_products(const ListedKeys& list, int64_t e, int64_t d, int64_t width, const float* sums, float* c) {
    const int64_t cols = min(width - d, kScatterColumns), keys = min<int64_t>(list.count - e, kUnitSide);
    for (int64_t k = 0; k < keys; ++k, sums += cols) {
      float* const to = c + list.keys[e + k] * width + d;
      const float* const next = c + list.keys[min(e + k + kUnitSide, list.count - 1)] * width + d;
      for (int64_t j = 0; j < cols; j += kUnitSide) {
        __builtin_prefetch(next + j, 1);
        store(to + j, load(to + j) + load(sums + j));
      }
    }
  }

  // sums = W^T A over all tiles of heads.
  template <int kTiles>
  static SCALEDOT_NOINLINE void multiply_columns(const UnitWeights* weights, int64_t tiles, const Bf16Pair* a,
                                                 float* sums) {
    static_assert(kTiles == 2 || kTiles == 4);
    constexpr int64_t kBytes = kTiles * kUnitRowBytes;
    const int64_t next = tiles * kUnitPairs;  // columns
    __asm__ volatile("" ::: "memory");        // as in tile_unit.h
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTiles == 4) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t t = 0; t < tiles; ++t, a += kUnitPairs) {
      _tile_loadd(4, weights[t].pairs[0], kUnitRowBytes);
      _tile_loadd(5, a, kUnitRowBytes);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, a + next, kUnitRowBytes);
      _tile_dpbf16ps(1, 4, 6);
      if constexpr (kTiles == 4) {
        _tile_loadd(7, a + 2 * next, kUnitRowBytes);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, a + 3 * next, kUnitRowBytes);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    _tile_stored(0, sums, kBytes);
    _tile_stored(1, sums + kUnitSide, kBytes);
    if constexpr (kTiles == 4) {
      _tile_stored(2, sums + 2 * kUnitSide, kBytes);
      _tile_stored(3, sums + 3 * kUnitSide, kBytes);
    }
    __asm__ volatile("" ::: "memory");
  }

  const Scratch s_;
};

}  // namespace
}  // namespace scaledot
