// Products of the decode kernel with bfloat16 keys and values, on the tile unit of AMX.
//
//   S^T = K Q^T    a tile of K is 16 keys by 32 columns as they lie in memory; Q is packed once
//   O = P V        the values of two neighbouring keys are interleaved, in registers and the first-level cache
// A call over many keys waits for memory, which is read once and in order. So it does not matter that few query rows
// leave most of a tile empty. P is rounded to bfloat16, as in the tiled kernel. tile_unit.h has the terms.
#pragma once

#include "cpu/simd/attention/decode.h"
#include "cpu/simd/tile_unit.h"

namespace scaledot {
namespace {

class DecodeTileProducts : public DecodeProducts<BFloat16, float> {
  using Base = DecodeProducts<BFloat16, float>;
  static constexpr int64_t kUnitColumns = 2 * kUnitSide;  // of bfloat16
  static constexpr int64_t kUnitPairs = kUnitSide * kUnitSide;

 public:
  using Base::Base;

  static void begin_task() { begin_tiles(); }
  static void end_task() { end_tiles(); }

  // Packs rows that are to be multiplied with M: a tile for each kUnitSide rows and kUnitColumns columns.
  void order(const float* rows, float* ordered) const {
    Bf16Pair* to = reinterpret_cast<Bf16Pair*>(ordered);
    for (int64_t r = 0; r < rows_.whole_rows; r += kUnitSide)
      for (int64_t d = 0; d < width_; d += kUnitColumns, to += kUnitPairs) {
        Bf16Pair pairs[kUnitPairs];
        for (int64_t i = 0; i < kUnitSide; ++i) narrow_row(rows + (r + i) * width_ + d, pairs + i * kUnitSide);
        Vec<Bf16Pair> square[kUnitSide];
#pragma GCC unroll 16
        for (int i = 0; i < kUnitSide; ++i) square[i] = load(pairs + i * kUnitSide);
        transpose<float>(square);
#pragma GCC unroll 16
        for (int i = 0; i < kUnitSide; ++i) store(to + i * kUnitSide, square[i]);
      }
  }

  // S = Q M^T.
  void dot_products(const DecodeHead<float>* heads, Range span) const {
    const Rows key = rows_of(heads[0].tile, span);
    bool unused[kTurnHeads];
    for_each_steps(key, count(span), kUnitSide, unused, [&](int64_t h, const Steps& steps, Fetch& fetch) {
      score_keys(key, steps, heads[h].scratch, fetch);
    });
  }

  // P M of each head, to the sums in its scratch. P: `scores` of the scratch.
  void sum_values(const DecodeHead<float>* heads, Range span) const {
    const Rows value = rows_of(heads[0].tile, span);
    for (int64_t h = 0; h < rows_.turns; ++h) begin_sums(count(span), heads[h].scratch);
    bool unused[kTurnHeads];
    for_each_steps(value, count(span), kUnitSide, unused, [&](int64_t h, const Steps& steps, Fetch& fetch) {
      rows_.whole_rows > kUnitSide ? add_values<2>(value, steps, heads[h].scratch, fetch)
                                   : add_values<1>(value, steps, heads[h].scratch, fetch);
    });
    for (int64_t h = 0; h < rows_.turns; ++h)
      for (int64_t d = 0; d < rows_.rows * width_; d += kUnitColumns) order_columns(heads[h].scratch.sums + d);
  }

 private:
  // kUnitSide rows, `bytes` from each other.
  struct UnitRows {
    const BFloat16* first;
    int64_t bytes;
  };

  // Prefetches for the next steps, in `slots` parts between other work: many prefetches at a time would wait for each
  // other. (Without prefetches, or with all of them at once, decoding takes 1.3 to 1.5 times as long. Intel Xeon with
  // AMX, 64 query and 8 KV heads of 128, 16,384 keys.)
  struct SlowFetch {
    Fetch& fetch;
    const int64_t slots;
    int64_t step;
    int64_t due = 0;

    SCALEDOT_INLINE void operator()() {
      for (due += kUnitSide; due >= slots; due -= slots) fetch.before(step++);
    }
  };

  static void narrow_row(const float* from, Bf16Pair* to) {
    OperandTraits<Bf16Pair>::store_along(to, 0, load(from));
    OperandTraits<Bf16Pair>::store_along(to, kUnitSide, load(from + kUnitSide));
  }

  // The keys of a stream in these steps. They are copied if they are not equally far from each other, as at the end of
  // a page and behind the last key, or do not fill the columns of a tile.
  UnitRows unit_rows(const Rows& key, const Steps& steps, int stream, BFloat16* copy) const {
    const BFloat16* const* rows = key.rows + steps.key(steps.begin, stream);
    const int64_t stride = rows[1] - rows[0];
    bool even = cols_ == width_;
    for (int i = 2; i < kUnitSide; ++i) even &= rows[i] - rows[i - 1] == stride;
    if (even) return {rows[0] + steps.offset, stride * int64_t(sizeof(BFloat16))};
    for (int i = 0; i < kUnitSide; ++i)
      for (int64_t d = 0; d < width_; d += kUnitColumns)
        *reinterpret_cast<LooseRow*>(copy + i * width_ + d) = load_columns(rows[i] + steps.offset + d, cols_ - d);
    return {copy, width_ * int64_t(sizeof(BFloat16))};
  }

  void score_keys(const Rows& key, const Steps& steps, const DecodeScratch<float>& s, Fetch& fetch) const {
    const int64_t blocks = width_ / kUnitColumns * (rows_.whole_rows / kUnitSide);
    SlowFetch slow = {fetch, kDecodeStreams * blocks, steps.begin};
    UnitRows keys[kDecodeStreams];
    for (int i = 0; i < kDecodeStreams; ++i)
      keys[i] = unit_rows(key, steps, i, reinterpret_cast<BFloat16*>(s.widened) + i * kUnitSide * width_);
    const Bf16Pair* query = reinterpret_cast<const Bf16Pair*>(s.query);
    for (int64_t r = 0; r < rows_.rows; r += kUnitSide, query += kUnitSide * width_ / 2) {
      alignas(kCacheLine) float sums[kDecodeStreams][kUnitPairs];
      multiply_keys(keys, width_, query, sums, slow);
      for (int i = 0; i < kDecodeStreams; ++i)
        store_scores(sums[i], min<int64_t>(rows_.rows - r, kUnitSide),
                     s.scores + r * kDecodeSplit + steps.key(steps.begin, i));
    }
  }

  // sums[stream] = 16 keys x 16 query rows.
  SCALEDOT_NOINLINE static void multiply_keys(const UnitRows (&keys)[kDecodeStreams], int64_t width,
                                              const Bf16Pair* query, float (&sums)[kDecodeStreams][kUnitPairs],
                                              SlowFetch& fetch) {
    static_assert(kDecodeStreams == 4);
    __asm__ volatile("" ::: "memory");  // as in tile_unit.h
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < width; d += kUnitColumns, query += kUnitPairs) {
      _tile_loadd(4, query, kUnitRowBytes);
      _tile_loadd(5, keys[0].first + d, keys[0].bytes);
      _tile_dpbf16ps(0, 5, 4);
      fetch();
      _tile_loadd(6, keys[1].first + d, keys[1].bytes);
      _tile_dpbf16ps(1, 6, 4);
      fetch();
      _tile_loadd(7, keys[2].first + d, keys[2].bytes);
      _tile_dpbf16ps(2, 7, 4);
      fetch();
      _tile_loadd(5, keys[3].first + d, keys[3].bytes);
      _tile_dpbf16ps(3, 5, 4);
      fetch();
    }
    _tile_stored(0, sums[0], kUnitRowBytes);
    _tile_stored(1, sums[1], kUnitRowBytes);
    _tile_stored(2, sums[2], kUnitRowBytes);
    _tile_stored(3, sums[3], kUnitRowBytes);
    __asm__ volatile("" ::: "memory");
  }

  static void store_scores(const float* sums, int64_t rows, float* scores) {
    Vec<float> square[kUnitSide];
#pragma GCC unroll 16
    for (int i = 0; i < kUnitSide; ++i) square[i] = load(sums + i * kUnitSide);
    transpose<float>(square);
#pragma GCC unroll 16
    for (int i = 0; i < kUnitSide; ++i)
      if (i < rows) store(scores + i * kDecodeSplit, square[i]);
  }

  // Adds the products of kUnitSide steps to the sums of all rows.
  template <int kRowTiles>
  void add_values(const Rows& value, const Steps& steps, const DecodeScratch<float>& s, Fetch& fetch) const {
    static_assert(kDecodeStreams == 4);
    // Two streams are a depth of kUnitSide pairs.
    alignas(kCacheLine) Bf16Pair weights[2][kRowTiles][kUnitPairs];
    for (int64_t r = 0; r < rows_.rows; ++r)
      for (int half = 0; half < 2; ++half) {
        Bf16Pair* const to = weights[half][r / kUnitSide] + r % kUnitSide * kUnitSide;
        for (int i = 0; i < 2; ++i)
          OperandTraits<Bf16Pair>::store_along(
              to, i * kUnitSide, load(s.scores + r * kDecodeSplit + steps.key(steps.begin, 2 * half + i)));
      }
    for (int64_t r = rows_.rows; r < kRowTiles * kUnitSide; ++r)
      for (int half = 0; half < 2; ++half)
        __builtin_memset(weights[half][r / kUnitSide] + r % kUnitSide * kUnitSide, 0, kUnitRowBytes);
    alignas(kCacheLine) Bf16Pair values[2][2][kUnitPairs];
    SlowFetch slow = {fetch, kDecodeStreams * (width_ / kUnitColumns), steps.begin};
    for (int64_t d = 0; d < width_; d += kUnitColumns) {
      for (int stream = 0; stream < kDecodeStreams; ++stream) {
        slow();
        interleave_values(value, steps, stream, d, values[stream / 2]);
      }
      multiply_values<kRowTiles>(weights, values, s.sums + d, width_);
    }
  }

  // A Bf16Pair of each two values of a stream, in kUnitColumns columns: the first half of each eight columns, and the
  // second.
  SCALEDOT_INLINE void interleave_values(const Rows& value, const Steps& steps, int stream, int64_t d,
                                         Bf16Pair (&to)[2][kUnitPairs]) const {
    const BFloat16* const* rows = value.rows + steps.key(steps.begin, stream);
    const int64_t first = stream % 2 * (kUnitPairs / 2);
#pragma GCC unroll 8
    for (int k = 0; k < kUnitSide; k += 2) {
      const Row a = load_columns(rows[k] + steps.offset + d, cols_ - d);
      const Row b = load_columns(rows[k + 1] + steps.offset + d, cols_ - d);
      const int64_t line = first + k / 2 * kUnitSide;
      *reinterpret_cast<LooseRow*>(to[0] + line) = interleave<0>(a, b);
      *reinterpret_cast<LooseRow*>(to[1] + line) = interleave<4>(a, b);
    }
  }

  using Row = Native<uint16_t>;
  using LooseRow = Loose<uint16_t, kLanes<uint16_t>>;

  static SCALEDOT_INLINE Row load_columns(const BFloat16* from, int64_t available) {
    if (available >= kUnitColumns) return *reinterpret_cast<const LooseRow*>(from);
    return first_elements<Row>(from, available);
  }

  // Columns kFirst to kFirst + 3 of each eight of two rows: one instruction.
  template <int kFirst>
  static SCALEDOT_INLINE Row interleave(Row a, Row b) {
    Row lanes;
#pragma GCC unroll 32
    for (int l = 0; l < kUnitColumns; ++l)
      lanes[l] = uint16_t(l / 8 * 8 + kFirst + l % 8 / 2 + (l % 2 ? kUnitColumns : 0));
    return shuffle(a, b, lanes);
  }

  // sums += P V for one block of columns. Row tiles are kUnitSide rows apart.
  template <int kRowTiles>
  SCALEDOT_NOINLINE static void multiply_values(const Bf16Pair (&weights)[2][kRowTiles][kUnitPairs],
                                                const Bf16Pair (&values)[2][2][kUnitPairs], float* sums,
                                                int64_t width) {
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
      _tile_loadd(4, weights[half][0], kUnitRowBytes);
      _tile_loadd(6, values[half][0], kUnitRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, values[half][1], kUnitRowBytes);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (kRowTiles == 2) {
        _tile_loadd(5, weights[half][1], kUnitRowBytes);
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
  static void order_columns(float* block) {
    float columns[kUnitColumns];
    __builtin_memcpy(columns, block, sizeof(columns));
    for (int c = 0; c < kUnitColumns; ++c) block[c] = columns[c % 8 / 4 * kUnitSide + c / 8 * 4 + c % 4];
  }
};

}  // namespace
}  // namespace scaledot
