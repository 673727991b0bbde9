// The products of the decode kernels with keys or values that are read in place.
#pragma once

#include "cpu/simd/attention/decode_fetch.h"

namespace scaledot {
namespace {

// E4M3 is widened to numbers that are kE4M3Power too small, with 480 for NaN: in half the time. Sums of products are
// multiplied by kPower<Storage>, and NaN is looked for separately (for_each_nan).
template <class Storage>
constexpr float kPower = __is_same(Storage, Float8E4M3) ? kE4M3Power : 1.0f;

template <class Storage>
SCALEDOT_INLINE auto widen_whole(const Storage* from) {
  if constexpr (__is_same(Storage, Float8E4M3))
    return Vec<float>(widen_small(from));
  else
    return widen_load(from);
}

// kLanes elements of a contiguous row. Only `available` of them exist; the rest count as 0.
template <class Sum, class Storage>
SCALEDOT_INLINE Vec<Sum> widen_some(const Storage* from, int64_t available) {
  if (available >= kLanes<Sum>) return widen_whole(from);
  const auto bits = first_elements<Native<uint8_t>>(from, available);
  return widen_whole(reinterpret_cast<const Storage*>(&bits));
}

// bfloat16 is widened in blocks of 2 kLanes columns: the even ones, then the odd ones. Query rows and the sums of P V
// have this order too, for all whole blocks. Columns behind the last block lie as they are.
template <class Storage>
constexpr bool kEvenThenOdd = __is_same(Storage, BFloat16);

template <class Sum>
int64_t block_columns(int64_t cols) {
  return cols / (2 * kLanes<Sum>)*(2 * kLanes<Sum>);
}

// Vector v of the columns at `from`, in that order.
template <class Storage>
SCALEDOT_INLINE auto widen_ordered(const Storage* from, int v) {
  if constexpr (!kEvenThenOdd<Storage>)
    return widen_whole(from + v * kLanes<typename Compute<Storage>::type>);
  else
    return v % 2 ? widen_odd(from + (v - 1) * kLanes<float>) : widen_even(from + v * kLanes<float>);
}

// `matrix`: p.key or p.value, with `cols` columns; M below.
template <class Storage, class Sum>
class DecodeProducts {
 public:
  DecodeProducts(const Problem& p, const DecodeRows& rows, const TensorView& matrix, int64_t cols)
      : p_(p),
        rows_(rows),
        matrix_(matrix),
        cols_(cols),
        width_(padded<Sum>(cols)),
        row_lanes_(row_lanes<Sum>(rows.rows)) {}

  // Around the products of a task.
  static void begin_task() {}
  static void end_task() {}

  // Copies the rows of a head, which are to be multiplied with M, in the order that dot_products reads.
  void order(const Sum* rows, Sum* ordered) const {
    if (row_lanes_ > 0) return transpose_rows(rows, rows_.rows, width_, row_lanes_, ordered);
    for (int64_t d = 0; d < rows_.whole_rows * width_; d += kLanes<Sum>) store(ordered + d, load(rows + d));
    reorder<true>(ordered);
  }

  // S = Q M^T, with vectors along the columns, or along the rows if they are many.
  void dot_products(const DecodeHead<Sum>* heads, Range span) const {
    const int64_t keys = count(span), width = width_;
    const Rows key = rows_of(heads[0].tile, span);
    const int64_t at_once = row_lanes_ > 0 || rows_.whole_rows % kRowBlock<Sum> ? kGroupSteps<Sum> : 1;
    bool nan[kTurnHeads] = {};
    for_each_steps(key, keys, at_once, nan, [&](int64_t h, const Steps& steps, Fetch& fetch) {
      const DecodeScratch<Sum>& s = heads[h].scratch;
      for (int64_t step = steps.begin; step < steps.end; ++step) fetch.before(step);
      if (row_lanes_ > 0) return dot_all_rows(key, steps, s);
      for_each_rows([&](auto rows, int64_t r) {
        constexpr int kKeys = min(kLanes<Sum> / rows.count, kDecodeStreams * kGroupSteps<Sum>);
        for (int64_t step = steps.begin; step < steps.end; step += max(kKeys / kDecodeStreams, 1))
          for (int stream = 0; stream < kDecodeStreams; stream += kKeys)
            dot_rows<rows.count, kKeys>(key, steps, step, stream, s.query + r * width, s.scores + r * kDecodeSplit);
      });
    });
    for (int64_t h = 0; h < rows_.turns; ++h) {
      if (!nan[h]) continue;
      for_each_nan(key, h * matrix_.head_stride, keys, [&](int64_t k, int64_t) {
        for (int64_t r = 0; r < rows_.rows; ++r)
          heads[h].scratch.scores[r * kDecodeSplit + k] = Sum(__builtin_nanf(""));
      });
    }
  }

  // P M of each head, to the sums in its scratch. P: `scores` of the scratch.
  void sum_values(const DecodeHead<Sum>* heads, Range span) const {
    const int64_t keys = count(span);
    const Rows value = rows_of(heads[0].tile, span);
    for (int64_t h = 0; h < rows_.turns; ++h) begin_sums(keys, heads[h].scratch);
    bool nan[kTurnHeads] = {};
    for_each_steps(value, keys, kGroupSteps<Sum>, nan, [&](int64_t h, const Steps& now, Fetch& fetch) {
      const DecodeScratch<Sum>& s = heads[h].scratch;
      for (int64_t step = now.begin; step < now.end; ++step) fetch.before(step);
      for_each_rows([&](auto rows, int64_t r) {
        add_rows<rows.count>(value, now, s.scores + r * kDecodeSplit, s.sums + r * width_);
      });
    });
    for (int64_t h = 0; h < rows_.turns; ++h) {
      reorder<false>(heads[h].scratch.sums);
      end_sums(value, h * matrix_.head_stride, keys, heads[h].scratch, nan[h]);
    }
  }

  // P M for one head, without the terms whose weight is kSkip, one row and vector at a time.
  SCALEDOT_RARE void sum_live_values(const DecodeHead<Sum>& head, Range span) const {
    const int64_t keys = count(span), cols = cols_, steps = Streams(keys).steps;
    const Rows value = rows_of(head.tile, span);
    const DecodeScratch<Sum>& s = head.scratch;
    begin_sums(keys, s);
    for (int64_t step = 0; step < steps; step += kGroupSteps<Sum>)
      for (int64_t r = 0; r < rows_.rows; ++r)
        for (int64_t d = 0; d < cols; d += kLanes<Sum>)
          add_columns<1, 1, true>(value, {step, step + kGroupSteps<Sum>, steps, 0}, s.scores + r * kDecodeSplit, d,
                                  s.sums + r * width_,
                                  [&](const Storage* x, int) { return widen_some<Sum>(x, cols - d); });
    end_sums(value, 0, keys, s, true);
  }

 protected:
  using Rows = KeyRowPointers<Storage, kDecodeSplit>;
  using Streams = DecodeStreams<Sum>;
  using Fetch = DecodeFetch<Storage>;

  // The keys of steps begin, ..., end - 1: one of each stream a step.
  struct Steps {
    int64_t begin, end, all;  // all: steps of a stream
    int64_t offset;           // of the head's rows, in elements, from those of the first head
    int64_t key(int64_t step, int stream) const { return stream * all + step; }
  };

  // The rows of all streams; the last key again where there is none: nobody reads its score, and its weight is kSkip.
  Rows rows_of(const QueryTile& tile, Range span) const {
    const int64_t keys = count(span), all = Streams(keys).places();
    Rows rows = key_rows<Storage, kDecodeSplit>(p_, matrix_, tile.batch, tile.kv_head, span);
    for (int64_t k = keys; k < all; ++k) rows.rows[k] = rows.rows[keys - 1];
    return rows;
  }

  // Calls body(head, steps, fetch) for all steps of the streams, `at_once` of them at a time, and all heads that take
  // turns: some steps of each head, then the next steps, so that the heads read the same part of memory. `body` calls
  // fetch.before() for each step. nan[head]: whether its rows may have a NaN of E4M3.
  template <class Body>
  SCALEDOT_INLINE void for_each_steps(const Rows& rows, int64_t keys, int64_t at_once, bool* nan,
                                      const Body& body) const {
    const int64_t all = Streams(keys).steps;
    Fetch fetch(p_, matrix_, cols_, rows, keys, rows_.turns);
    for (Range piece = fetch.piece_from(0); count(piece) > 0; piece = fetch.piece_from(piece.end))
      for (int64_t h = 0; h < rows_.turns; ++h) {
        for (int64_t step = piece.begin; step < piece.end; step += at_once)
          body(h, Steps{step, step + at_once, all, h * matrix_.head_stride}, fetch);
        if constexpr (__is_same(Storage, Float8E4M3))
          nan[h] |= any_nan(rows, h * matrix_.head_stride, keys, piece, cols_);
      }
  }

  // Clears the sums of a head. Where a stream has no key, its weights are kSkip.
  void begin_sums(int64_t keys, const DecodeScratch<Sum>& s) const {
    clear_row(s.sums, rows_.whole_rows * width_);
    const int64_t all = Streams(keys).places();
    for (int64_t r = 0; r < rows_.whole_rows; ++r)
      for (int64_t k = keys; k < all; ++k) s.scores[r * kDecodeSplit + k] = kSkip<Sum>;
  }

  const Problem& p_;
  const DecodeRows rows_;
  const TensorView& matrix_;
  const int64_t cols_, width_;

 private:
  // Whether there is a NaN of E4M3 in the rows of these steps: all ones, besides the sign.
  SCALEDOT_NOINLINE static bool any_nan(const Rows& rows, int64_t offset, int64_t keys, Range steps, int64_t cols) {
    constexpr uint8_t kSign = 0x80, kAllOnes = 0xff;
    using Bytes = Native<uint8_t>;
    const Streams streams(keys);
    Bytes largest = {};
    uint8_t of_rest = 0;
    for (int i = 0; i < kDecodeStreams; ++i)
      for (int64_t k = streams.key(steps.begin, i); k < min(streams.key(steps.end, i), keys); ++k) {
        const Storage* row = rows.row(k) + offset;
        int64_t d = 0;
        for (; d + kVectorBytes <= cols; d += kVectorBytes) {
          const Bytes x = *reinterpret_cast<const Loose<uint8_t, kVectorBytes>*>(row + d) | kSign;
          largest = x > largest ? x : largest;
        }
        for (; d < cols; ++d) of_rest = max(of_rest, uint8_t(row[d].bits | kSign));
      }
    for (int k = 0; k < kVectorBytes; ++k) of_rest = max(of_rest, uint8_t(largest[k]));
    return of_rest == kAllOnes;
  }

  template <int kCount>
  struct Count {
    static constexpr int count = kCount;
  };

  // Calls body(Count<count>{}, r) for blocks of kRowBlock rows, then for single rows. The last rows may be padding.
  template <class Body>
  void for_each_rows(const Body& body) const {
    int64_t r = 0;
    for (; r + kRowBlock<Sum> <= rows_.whole_rows; r += kRowBlock<Sum>) body(Count<kRowBlock<Sum>>{}, r);
    for (; r < rows_.whole_rows; ++r) body(Count<1>{}, r);
  }

  // The scores of kRows rows with kKeys keys: a square of sums, one for each. The keys are those of `stream` and the
  // next streams at `step`, then at the next steps.
  template <int kRows, int kKeys>
  void dot_rows(const Rows& key, const Steps& steps, int64_t step, int stream, const Sum* query, Sum* scores) const {
    const int64_t cols = cols_, width = width_;
    const auto key_at = [&](int i) { return steps.key(step + i / kDecodeStreams, stream + i % kDecodeStreams); };
    const Storage* from[kKeys];
#pragma GCC unroll 16
    for (int i = 0; i < kKeys; ++i) from[i] = key.row(key_at(i)) + steps.offset;
    Vec<Sum> sum[kLanes<Sum>];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<Sum>; ++i) sum[i] = Vec<Sum>(Sum(0));
    const auto add = [&](int64_t d, const auto& widened) {
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) {
        const Vec<Sum> x = widened(from[i]);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          Vec<Sum>& one = sum[r * kKeys + i];
          one = fma(x, load(query + r * width + d), one);
        }
      }
    };
    int64_t d = 0;
    for (const int64_t end = block_columns<Sum>(cols); d < end; d += 2 * kLanes<Sum>) {
      add(d, [d](const Storage* x) { return widen_ordered(x + d, 0); });
      add(d + kLanes<Sum>, [d](const Storage* x) { return widen_ordered(x + d, 1); });
    }
    for (; d < cols; d += kLanes<Sum>) add(d, [&](const Storage* x) { return widen_some<Sum>(x + d, cols - d); });
    Vec<Sum> square[kLanes<Sum>];  // a copy: passed by reference, the sums would be kept in memory
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<Sum>; ++i) square[i] = sum[i];
    Sum lanes[kLanes<Sum>];
    store(lanes, sums_of(square) * Vec<Sum>(Sum(kPower<Storage>)));
#pragma GCC unroll 16
    for (int i = 0; i < kRows * kKeys; ++i) scores[i / kKeys * kDecodeSplit + key_at(i % kKeys)] = lanes[i];
  }

  // The scores of all rows with the keys of kGroupSteps steps, by row_lanes.h.
  void dot_all_rows(const Rows& key, const Steps& steps, const DecodeScratch<Sum>& s) const {
    const auto key_at = [&](int i) { return steps.key(steps.begin + i / kDecodeStreams, i % kDecodeStreams); };
    const Sum* rows[kGroupKeys<Sum>];
    for (int i = 0; i < kGroupKeys<Sum>; ++i) {
      const Storage* from = key.row(key_at(i)) + steps.offset;
      if constexpr (__is_same(Storage, Sum)) {
        rows[i] = from;
      } else {
        Sum* const line = s.widened + i * width_;
        for (int64_t d = 0; d < cols_; d += kLanes<Sum>) store(line + d, widen_some<Sum>(from + d, cols_ - d));
        rows[i] = line;
      }
    }
    const auto multiply = [&]<int kVectors>(Count<kVectors>, int64_t r) {
      Sum sums[kVectors * kGroupKeys<Sum> * kLanes<Sum>];
      for (int i = 0; i < kGroupKeys<Sum>; i += kLaneKeys<Sum, kVectors>)
        multiply_lanes<kVectors>(rows + i, cols_, s.query + r, row_lanes_, sums + i * kVectors * kLanes<Sum>);
      for (int v = 0; v < kVectors; ++v, r += kLanes<Sum>)
        store_scores(sums + v * kLanes<Sum>, kVectors * kLanes<Sum>, min<int64_t>(rows_.whole_rows - r, kLanes<Sum>),
                     s.scores + r * kDecodeSplit + steps.begin, steps.all);
    };
    int64_t r = 0;
    for (; r + 2 * kLanes<Sum> <= row_lanes_; r += 2 * kLanes<Sum>) multiply(Count<2>{}, r);
    if (r < row_lanes_) multiply(Count<1>{}, r);
  }

  // Sums of a group of keys (key, row) to scores (row, key). Keys of a stream are neighbours, `stream` from the next.
  void store_scores(const Sum* sums, int64_t next, int64_t rows, Sum* scores, int64_t stream) const {
    for (int k = 0; k < kGroupKeys<Sum>; k += kLanes<Sum>) {
      // Lane i of a line of scores is step i % kGroupSteps of stream i / kGroupSteps.
      Vec<Sum> square[kLanes<Sum>];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes<Sum>; ++i) {
        const int step = (k + i) % kGroupSteps<Sum>, from = step * kDecodeStreams + (k + i) / kGroupSteps<Sum>;
        square[i] = load(sums + from * next) * Vec<Sum>(Sum(kPower<Storage>));
      }
      transpose<Sum>(square);
      Sum lines[kLanes<Sum>][kLanes<Sum>];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes<Sum>; ++i) store(lines[i], square[i]);
      for (int64_t r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < kLanes<Sum>; i += kGroupSteps<Sum>)
          __builtin_memcpy(scores + r * kDecodeSplit + (k + i) / kGroupSteps<Sum> * stream, lines[r] + i,
                           kGroupSteps<Sum> * sizeof(Sum));
    }
  }

  // Calls body(key, column) for each NaN of E4M3 in the rows. `offset`: of the head from the first one.
  template <class Body>
  SCALEDOT_RARE void for_each_nan(const Rows& rows, int64_t offset, int64_t keys, const Body& body) const {
    if constexpr (__is_same(Storage, Float8E4M3))
      for (int64_t k = 0; k < keys; ++k)
        for (int64_t d = 0; d < cols_; ++d)
          if (const float x = widen(rows.row(k)[offset + d]); x != x) body(k, d);
  }

  // Brings the whole blocks of all rows into the order of columns (kEvenThenOdd), or back.
  template <bool kForth>
  void reorder(Sum* first) const {
    if constexpr (kEvenThenOdd<Storage>)
      for (int64_t r = 0; r < rows_.rows; ++r)
        for (int64_t d = 0; d < block_columns<Sum>(cols_); d += 2 * kLanes<Sum>) {
          Sum* block = first + r * width_ + d;
          Sum columns[2 * kLanes<Sum>];
          __builtin_memcpy(columns, block, sizeof(columns));
          for (int k = 0; k < 2 * kLanes<Sum>; ++k) {
            const int ordered = k / 2 + k % 2 * kLanes<Sum>;
            block[kForth ? ordered : k] = columns[kForth ? k : ordered];
          }
        }
  }

  // Finishes sums of E4M3: multiplies them by its power, and restores NaN.
  void end_sums(const Rows& value, int64_t offset, int64_t keys, const DecodeScratch<Sum>& s, bool nan) const {
    if constexpr (kPower<Storage> != 1.0f)
      for (int64_t k = 0; k < rows_.rows * width_; ++k) s.sums[k] *= kPower<Storage>;
    if (!nan) return;
    for_each_nan(value, offset, keys, [&](int64_t k, int64_t d) {
      for (int64_t r = 0; r < rows_.rows; ++r)
        if (!is_skip(s.scores[r * kDecodeSplit + k])) s.sums[r * width_ + d] = Sum(__builtin_nanf(""));
    });
  }

  // Adds the products of some steps to the sums of kRows rows.
  template <int kRows>
  SCALEDOT_INLINE void add_rows(const Rows& value, const Steps& steps, const Sum* weights, Sum* sums) const {
    constexpr int kMost = kDecodeValueVectors / kRows;
    const int64_t cols = cols_;
    const auto add = [&]<int kVectors>(Count<kVectors>, int64_t d, const auto& widened) {
      add_columns<kRows, kVectors, false>(value, steps, weights, d, sums, widened);
    };
    int64_t d = 0;
    const auto add_whole = [&]<int kVectors>(Count<kVectors> vectors) {
      for (; d + kVectors * kLanes<Sum> <= cols; d += kVectors * kLanes<Sum>)
        add(vectors, d, [](const Storage* x, int v) { return widen_ordered(x, v); });
    };
    add_whole(Count<kMost>{});
    if constexpr (kMost > 8) add_whole(Count<8>{});
    if constexpr (kMost > 4) add_whole(Count<4>{});
    if constexpr (kMost > 2) add_whole(Count<2>{});
    for (; d < cols; d += kLanes<Sum>)
      add(Count<1>{}, d, [&](const Storage* x, int) { return widen_some<Sum>(x, cols - d); });
  }

  // Adds columns d, ... of the products of kGroupSteps steps. They are summed step by step, and stream by stream,
  // wherever the sum is, and then added: one long chain would lose more bits.
  template <int kRows, int kVectors, bool kSkipMasked, class Widen>
  SCALEDOT_INLINE void add_columns(const Rows& value, const Steps& steps, const Sum* weights, int64_t d, Sum* sums,
                                   const Widen& widened) const {
    const int64_t width = width_;
    Vec<Sum> sum[kRows][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Vec<Sum>(Sum(0));
    for (int64_t step = steps.begin; step < steps.end; ++step)
#pragma GCC unroll 4
      for (int stream = 0; stream < kDecodeStreams; ++stream) {
        const int64_t k = steps.key(step, stream);
        const Storage* row = value.row(k) + steps.offset + d;
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
          const Vec<Sum> x = widened(row, v);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r)
            if (const Sum weight = weights[r * kDecodeSplit + k]; !kSkipMasked || !is_skip(weight))
              sum[r][v] = fma(Vec<Sum>(weight), x, sum[r][v]);
        }
      }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        Sum* const to = sums + r * width + d + v * kLanes<Sum>;
        store(to, load(to) + sum[r][v]);
      }
  }

  const int64_t row_lanes_;  // rows in whole vectors, or 0: vectors are along the columns
};

}  // namespace
}  // namespace scaledot
