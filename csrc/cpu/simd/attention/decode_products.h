// The two products of the decode kernel, on keys and values that are read in place.
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
  const auto load_some = [&](auto* lanes, const auto& element) {
    for (int64_t d = 0; d < available; ++d) {
      lanes[d] = element(from[d]);
      __asm__("");  // keeps the loop as it is: a few elements are not worth a vectorised copy of it
    }
    return widen_load(lanes);
  };
  if constexpr (__is_same(Storage, Float16)) {  // faster to widen with one instruction
    Float16 lanes[kLanes<Sum>] = {};
    return load_some(lanes, [](Float16 x) { return x; });
  } else {
    Sum lanes[kLanes<Sum>] = {};
    return load_some(lanes, [](Storage x) { return widen(x) * Sum(1 / kPower<Storage>); });
  }
}

template <class Storage, class Sum>
class DecodeProducts {
 public:
  DecodeProducts(const Problem& p, const DecodePlan<Sum>& plan) : p_(p), plan_(plan) {}

  // S = Q K^T, with vectors along head_dim.
  void dot_products(const DecodeHead<Sum>* heads, Range span) const {
    const Rows key = rows_of(p_.key, heads[0].tile, span);
    const int64_t keys = count(span);
    const Streams streams(keys);
    bool nan[kTurnHeads] = {};
    for_each_step(p_.key, p_.head_dim, key, keys, nan, [&](int64_t h, int64_t step) {
      const DecodeScratch<Sum>& s = heads[h].scratch;
      const Storage* from[kDecodeStreams];  // past the end, the last key again: nobody reads those scores
      for (int i = 0; i < kDecodeStreams; ++i)
        from[i] = key.row(min(streams.key(step, i), keys - 1)) + h * p_.key.head_stride;
      for_each_rows([&](auto rows, int64_t r) {
        constexpr int kKeys = min(kLanes<Sum> / rows.count, kDecodeStreams);
        for (int first = 0; first < kDecodeStreams; first += kKeys)
          dot_rows<rows.count, kKeys>(from + first, s.query + r * padded<Sum>(p_.head_dim),
                                      s.scores + r * kDecodeSplit + streams.key(step, first), streams.steps);
      });
    });
    for (int64_t h = 0; h < plan_.turns; ++h) {
      if (!nan[h]) continue;
      for_each_nan(key, h * p_.key.head_stride, keys, p_.head_dim, [&](int64_t k, int64_t) {
        for (int64_t r = 0; r < plan_.rows; ++r)
          heads[h].scratch.scores[r * kDecodeSplit + k] = Sum(__builtin_nanf(""));
      });
    }
  }

  // P V of each head, to the sums in its scratch.
  void sum_values(const DecodeHead<Sum>* heads, Range span) const {
    const Rows value = rows_of(p_.value, heads[0].tile, span);
    const int64_t cols = p_.value_dim, keys = count(span);
    for (int64_t h = 0; h < plan_.turns; ++h) clear_row(heads[h].scratch.sums, plan_.whole_rows * plan_.width);
    bool nan[kTurnHeads] = {};
    for_each_step(p_.value, cols, value, keys, nan, [&](int64_t h, int64_t step) {
      const DecodeScratch<Sum>& s = heads[h].scratch;
      for_each_rows([&](auto rows, int64_t r) {
        constexpr int kRows = rows.count, kVectors = kDecodeValueVectors / kRows;
        Sum* sums = s.sums + r * plan_.width;
        const Step<kRows> now = step_of<kRows>(value, h * p_.value.head_stride, keys, step, r, s);
        int64_t d = 0;
        for (; d + kVectors * kLanes<Sum> <= cols; d += kVectors * kLanes<Sum>)
          add_columns<kRows, kVectors, false>(now, d, sums, [](const Storage* x) { return widen_whole(x); });
        for (; d < cols; d += kLanes<Sum>)
          add_columns<kRows, 1, false>(now, d, sums, [&](const Storage* x) { return widen_some<Sum>(x, cols - d); });
      });
    });
    for (int64_t h = 0; h < plan_.turns; ++h) end_sums(value, h * p_.value.head_stride, keys, heads[h].scratch, nan[h]);
  }

  // P V for one head, without the terms whose weight is kSkip, one row and vector at a time.
  SCALEDOT_RARE void sum_live_values(const DecodeHead<Sum>& head, Range span) const {
    const Rows value = rows_of(p_.value, head.tile, span);
    const int64_t cols = p_.value_dim, keys = count(span), steps = Streams(keys).steps;
    const DecodeScratch<Sum>& s = head.scratch;
    clear_row(s.sums, plan_.rows * plan_.width);
    for (int64_t step = 0; step < steps; ++step)
      for (int64_t r = 0; r < plan_.rows; ++r) {
        const Step<1> now = step_of<1>(value, 0, keys, step, r, s);
        for (int64_t d = 0; d < cols; d += kLanes<Sum>)
          add_columns<1, 1, true>(now, d, s.sums + r * plan_.width,
                                  [&](const Storage* x) { return widen_some<Sum>(x, cols - d); });
      }
    end_sums(value, 0, keys, s, true);
  }

 private:
  using Rows = KeyRowPointers<Storage, kDecodeSplit>;

  Rows rows_of(const TensorView& view, const QueryTile& tile, Range keys) const {
    return key_rows<Storage, kDecodeSplit>(p_, view, tile.batch, tile.kv_head, keys);
  }

  // Calls body(head, step) for all steps of the streams and all heads that take turns: some steps of each head, then
  // the next steps, so that the heads read the same part of memory. nan[head]: whether its rows may have a NaN of E4M3.
  template <class Body>
  SCALEDOT_INLINE void for_each_step(const TensorView& view, int64_t cols, const Rows& rows, int64_t keys, bool* nan,
                                     const Body& body) const {
    DecodeFetch<Storage> fetch(p_, view, cols, rows, keys, plan_.turns);
    for (Range piece = fetch.piece_from(0); count(piece) > 0; piece = fetch.piece_from(piece.end))
      for (int64_t h = 0; h < plan_.turns; ++h) {
        for (int64_t step = piece.begin; step < piece.end; ++step) {
          fetch.before(step);
          body(h, step);
        }
        if constexpr (__is_same(Storage, Float8E4M3)) nan[h] |= any_nan(rows, h * view.head_stride, keys, piece, cols);
      }
  }

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

  // Calls body(RowCount<count>{}, r) for blocks of kRowBlock rows, then for single rows. The last rows may be padding.
  template <int kCount>
  struct RowCount {
    static constexpr int count = kCount;
  };
  template <class Body>
  void for_each_rows(const Body& body) const {
    int64_t r = 0;
    for (; r + kRowBlock<Sum> <= plan_.whole_rows; r += kRowBlock<Sum>) body(RowCount<kRowBlock<Sum>>{}, r);
    for (; r < plan_.whole_rows; ++r) body(RowCount<1>{}, r);
  }

  // The scores of kRows rows and kKeys keys: kLanes vectors of sums, several for each score if there are fewer scores.
  // Scores of neighbouring keys are `stride` elements apart.
  template <int kRows, int kKeys>
  void dot_rows(const Storage* const* from, const Sum* query, Sum* scores, int64_t stride) const {
    constexpr int kScores = kRows * kKeys, kSums = kLanes<Sum> / kScores;
    const int64_t cols = p_.head_dim, width = padded<Sum>(cols);
    Vec<Sum> sum[kLanes<Sum>];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<Sum>; ++i) sum[i] = Vec<Sum>(Sum(0));
    const auto add = [&](int64_t d, int part, const auto& widened) {
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) {
        const Vec<Sum> x = widened(from[i] + d);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          Vec<Sum>& one = sum[part * kScores + r * kKeys + i];
          one = fma(x, load(query + r * width + d), one);
        }
      }
    };
    const auto whole = [](const Storage* x) { return widen_whole(x); };
    int64_t d = 0;
    for (; d + kSums * kLanes<Sum> <= cols; d += kSums * kLanes<Sum>)
#pragma GCC unroll 16
      for (int part = 0; part < kSums; ++part) add(d + part * kLanes<Sum>, part, whole);
    if constexpr (kSums > 1)
      for (; d + kLanes<Sum> <= cols; d += kLanes<Sum>) add(d, 0, whole);
    if (d < cols) add(d, 0, [&](const Storage* x) { return widen_some<Sum>(x, cols - d); });
    Vec<Sum> square[kLanes<Sum>];  // a copy: passed by reference, the sums would be kept in memory
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<Sum>; ++i) square[i] = sum[i];
    Sum lanes[kLanes<Sum>];
    store(lanes, sums_of(square));
#pragma GCC unroll 16
    for (int i = 0; i < kScores; ++i) {
      Sum score = lanes[i];
      for (int part = 1; part < kSums; ++part) score += lanes[part * kScores + i];
      scores[i / kKeys * kDecodeSplit + i % kKeys * stride] = score * Sum(kPower<Storage>);
    }
  }

  // Calls body(key, column) for each NaN of E4M3 in the rows. `offset`: of the head from the first one.
  template <class Body>
  SCALEDOT_RARE void for_each_nan(const Rows& rows, int64_t offset, int64_t keys, int64_t cols,
                                  const Body& body) const {
    if constexpr (__is_same(Storage, Float8E4M3))
      for (int64_t k = 0; k < keys; ++k)
        for (int64_t d = 0; d < cols; ++d)
          if (const float x = widen(rows.row(k)[offset + d]); x != x) body(k, d);
  }

  // Finishes sums of E4M3: multiplies them by its power, and restores NaN.
  void end_sums(const Rows& value, int64_t offset, int64_t keys, const DecodeScratch<Sum>& s, bool nan) const {
    if constexpr (kPower<Storage> != 1.0f)
      for (int64_t k = 0; k < plan_.rows * plan_.width; ++k) s.sums[k] *= kPower<Storage>;
    if (!nan) return;
    for_each_nan(value, offset, keys, p_.value_dim, [&](int64_t k, int64_t d) {
      for (int64_t r = 0; r < plan_.rows; ++r)
        if (!is_skip(s.scores[r * kDecodeSplit + k])) s.sums[r * plan_.width + d] = Sum(__builtin_nanf(""));
    });
  }

  // One key of each stream, and the weights that kRows rows give these keys.
  template <int kRows>
  struct Step {
    const Storage* value[kDecodeStreams];
    Sum weight[kDecodeStreams][kRows];
  };

  template <int kRows>
  SCALEDOT_INLINE Step<kRows> step_of(const Rows& value, int64_t offset, int64_t keys, int64_t step, int64_t r,
                                      const DecodeScratch<Sum>& s) const {
    const Streams streams(keys);
    Step<kRows> now;
    for (int i = 0; i < kDecodeStreams; ++i) {
      const int64_t k = streams.key(step, i);
      now.value[i] = value.row(min(k, keys - 1)) + offset;
      for (int one = 0; one < kRows; ++one)
        now.weight[i][one] = k < keys ? s.scores[(r + one) * kDecodeSplit + k] : kSkip<Sum>;
    }
    return now;
  }

  template <int kRows, int kVectors, bool kSkipMasked, class Widen>
  SCALEDOT_INLINE void add_columns(const Step<kRows>& step, int64_t d, Sum* sums, const Widen& widened) const {
    const int64_t width = plan_.width;
    Vec<Sum> sum[kRows][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = load(sums + r * width + d + v * kLanes<Sum>);
    for (int i = 0; i < kDecodeStreams; ++i) {
      const Sum* weight = step.weight[i];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const Vec<Sum> x = widened(step.value[i] + d + v * kLanes<Sum>);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
          if (!kSkipMasked || !is_skip(weight[r])) sum[r][v] = fma(Vec<Sum>(weight[r]), x, sum[r][v]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store(sums + r * width + d + v * kLanes<Sum>, sum[r][v]);
  }

  const Problem& p_;
  const DecodePlan<Sum>& plan_;
};

}  // namespace
}  // namespace scaledot
