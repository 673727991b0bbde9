// Products of the decode kernel with bfloat16 keys and values, on the tile unit of AMX (key_tiles.h).
//
// A call over many keys waits for memory, which is read once and in order. So it does not matter that few query rows
// leave most of a tile empty. P is rounded to bfloat16, as in the tiled kernel.
#pragma once

#include "cpu/simd/attention/decode.h"
#include "cpu/simd/attention/key_tiles.h"

namespace scaledot {
namespace {

static_assert(kDecodeStreams == kKeyTiles);  // a tile of each stream are kUnitKeys keys

class DecodeTileProducts : public DecodeProducts<BFloat16, float> {
  using Base = DecodeProducts<BFloat16, float>;

 public:
  using Base::Base;

  static void begin_task() { begin_tiles(); }
  static void end_task() { end_tiles(); }

  // Packs rows that are to be multiplied with M.
  void order(const float* rows, float* ordered) const {
    pack_query_tiles(rows, rows_.whole_rows, width_, reinterpret_cast<Bf16Pair*>(ordered));
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
  // Prefetches for the next steps, in `slots` parts between other work: many prefetches at a time would wait for each
  // other. (Without prefetches, or with all of them at once, decoding takes 1.3 to 1.5 times as long. Intel Xeon with
  // AMX, 64 query and 8 KV heads of 128, 16,384 keys.)
  struct SlowFetch {
    Fetch& fetch;
    const int64_t slots;
    int64_t step;
    int64_t due = 0;

    SCALEDOT_INLINE void operator()(int, int64_t) {
      for (due += kUnitSide; due >= slots; due -= slots) fetch.before(step++);
    }
  };

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
        *reinterpret_cast<LooseUnitRow*>(copy + i * width_ + d) = load_columns(rows[i] + steps.offset + d, cols_ - d);
    return {copy, width_ * int64_t(sizeof(BFloat16))};
  }

  void score_keys(const Rows& key, const Steps& steps, const DecodeScratch<float>& s, Fetch& fetch) const {
    const int64_t blocks = width_ / kUnitColumns * (rows_.whole_rows / kUnitSide);
    SlowFetch slow = {fetch, kKeyTiles * blocks, steps.begin};
    UnitRows keys[kKeyTiles];
    for (int i = 0; i < kKeyTiles; ++i)
      keys[i] = unit_rows(key, steps, i, reinterpret_cast<BFloat16*>(s.widened) + i * kUnitSide * width_);
    const Bf16Pair* query = reinterpret_cast<const Bf16Pair*>(s.query);
    for (int64_t r = 0; r < rows_.rows; r += kUnitSide, query += kUnitSide * width_ / 2) {
      alignas(kCacheLine) float sums[kKeyTiles][kUnitPairs];
      multiply_keys(
          [&](int i, int64_t d) {
            return UnitRows{keys[i].first + d, keys[i].bytes};
          },
          width_, query, sums, slow);
      for (int i = 0; i < kKeyTiles; ++i)
        store_score_tile(sums[i], min<int64_t>(rows_.rows - r, kUnitSide),
                         s.scores + r * kDecodeSplit + steps.key(steps.begin, i), kDecodeSplit);
    }
  }

  // Adds the products of kUnitSide steps to the sums of all rows.
  template <int kRowTiles>
  void add_values(const Rows& value, const Steps& steps, const DecodeScratch<float>& s, Fetch& fetch) const {
    // Two streams are a depth of kUnitSide pairs.
    alignas(kCacheLine) UnitWeights weights[kRowTiles];
    for (int64_t r = 0; r < rows_.rows; ++r)
      for (int half = 0; half < 2; ++half) {
        Bf16Pair* const to = weights[r / kUnitSide].pairs[half] + r % kUnitSide * kUnitSide;
        for (int i = 0; i < 2; ++i)
          OperandTraits<Bf16Pair>::store_along(
              to, i * kUnitSide, load(s.scores + r * kDecodeSplit + steps.key(steps.begin, 2 * half + i)));
      }
    for (int64_t r = rows_.rows; r < kRowTiles * kUnitSide; ++r)
      for (int half = 0; half < 2; ++half)
        __builtin_memset(weights[r / kUnitSide].pairs[half] + r % kUnitSide * kUnitSide, 0, kUnitRowBytes);
    alignas(kCacheLine) Bf16Pair values[2][2][kUnitPairs];
    SlowFetch slow = {fetch, kKeyTiles * (width_ / kUnitColumns), steps.begin};
    for (int64_t d = 0; d < width_; d += kUnitColumns) {
      for (int i = 0; i < kKeyTiles; ++i) {
        slow(i, d);
        const int64_t first = i % 2 * (kUnitPairs / 2);
        interleave_values(value.rows + steps.key(steps.begin, i), steps.offset, d, cols_, values[i / 2][0] + first,
                          values[i / 2][1] + first);
      }
      multiply_values<kRowTiles>(weights, values, s.sums + d, width_);
    }
  }
};

}  // namespace
}  // namespace scaledot
