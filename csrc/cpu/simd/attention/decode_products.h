// The two products of the decode kernel, on keys and values that are read in place.
#pragma once

#include "cpu/simd/attention/decode_plan.h"

namespace scaledot {
namespace {

// E4M3 is widened to numbers that are kE4M3Power too small, with 480 for NaN: in half the time. Sums of products are
// multiplied by kPower<Storage>, and NaN is looked for apart (for_each_nan).
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
template <class T, class Storage>
SCALEDOT_INLINE Vec<T> widen_some(const Storage* from, int64_t available) {
  if (available >= kLanes<T>) return widen_whole(from);
  const auto load_some = [&](auto* lanes, const auto& element) {
    for (int64_t d = 0; d < available; ++d) {
      lanes[d] = element(from[d]);
      __asm__("");  // keeps the loop as it is: a few elements are not worth a vectorised copy of it
    }
    return widen_load(lanes);
  };
  if constexpr (__is_same(Storage, Float16)) {  // faster to widen with one instruction
    Float16 lanes[kLanes<T>] = {};
    return load_some(lanes, [](Float16 x) { return x; });
  } else {
    T lanes[kLanes<T>] = {};
    return load_some(lanes, [](Storage x) { return widen(x) * T(1 / kPower<Storage>); });
  }
}

template <class Storage, class T>
class DecodeProducts {
  static constexpr int kRowBlock = kLanes<T> < kDecodeRowBlock ? kLanes<T> : kDecodeRowBlock;
  static constexpr uint8_t kSign = 0x80, kAllOnes = 0xff;  // a NaN of E4M3 has all ones, besides the sign

 public:
  DecodeProducts(const Problem& p, const DecodePlan<T>& plan)
      : p_(p),
        plan_(plan),
        fetch_keys_(fetches_ahead(p, p.key, p.head_dim)),
        fetch_values_(fetches_ahead(p, p.value, p.value_dim)) {}

  // S = Q K^T, with vectors along head_dim.
  void dot_products(const QueryTile& tile, Range keys, const DecodeScratch<T>& s) const {
    const auto key = key_rows<Storage, kDecodeChunk>(p_, p_.key, tile.batch, tile.kv_head, keys);
    const Streams streams(count(keys));
    for (int64_t step = 0; step < streams.steps; ++step) {
      const Storage* from[kDecodeStreams];  // past the end, the last key again: nobody reads those scores
      for (int i = 0; i < kDecodeStreams; ++i) from[i] = key.row(min(streams.key(step, i), count(keys) - 1));
      fetch_ahead(fetch_keys_, key, count(keys), step, p_.head_dim);
      for_each_rows([&](auto rows, int64_t r) {
        constexpr int kKeys = min(kLanes<T> / rows.count, kDecodeStreams);
        for (int first = 0; first < kDecodeStreams; first += kKeys)
          dot_rows<rows.count, kKeys>(from + first, s.query + r * padded<T>(p_.head_dim),
                                      s.scores + r * kDecodeChunk + streams.key(step, first), streams.steps);
      });
    }
    for_each_nan(key, count(keys), p_.head_dim, [&](int64_t k, int64_t) {
      for (int64_t r = 0; r < plan_.rows; ++r) s.scores[r * kDecodeChunk + k] = T(__builtin_nanf(""));
    });
  }

  using Values = KeyRowPointers<Storage, kDecodeChunk>;

  // s.sums = P V.
  void sum_values(const Values& value, int64_t keys, const DecodeScratch<T>& s) const {
    const int64_t cols = p_.value_dim;
    for_each_step(value, keys, s, [&](int64_t step) {
      for_each_rows([&](auto rows, int64_t r) {
        constexpr int kRows = rows.count, kVectors = kDecodeValueVectors / kRows;
        T* sums = s.sums + r * plan_.width;
        const Step<kRows> now = step_of<kRows>(value, keys, step, r, s);
        int64_t d = 0;
        for (; d + kVectors * kLanes<T> <= cols; d += kVectors * kLanes<T>)
          add_columns<kRows, kVectors, false>(now, d, sums, [](const Storage* x) { return widen_whole(x); });
        for (; d < cols; d += kLanes<T>)
          add_columns<kRows, 1, false>(now, d, sums, [&](const Storage* x) { return widen_some<T>(x, cols - d); });
      });
    });
    end_sums(value, keys, s);
  }

  // The same without the terms whose weight is kSkip, one row and vector at a time.
  SCALEDOT_RARE void sum_live_values(const Values& value, int64_t keys, const DecodeScratch<T>& s) const {
    const int64_t cols = p_.value_dim;
    for_each_step(value, keys, s, [&](int64_t step) {
      for (int64_t r = 0; r < plan_.rows; ++r) {
        const Step<1> now = step_of<1>(value, keys, step, r, s);
        for (int64_t d = 0; d < cols; d += kLanes<T>)
          add_columns<1, 1, true>(now, d, s.sums + r * plan_.width,
                                  [&](const Storage* x) { return widen_some<T>(x, cols - d); });
      }
    });
    end_sums(value, keys, s);
  }

 private:
  // Calls body(Rows<count>{}, r) for blocks of kRowBlock rows, then for single rows.
  template <int kCount>
  struct Rows {
    static constexpr int count = kCount;
  };
  template <class Body>
  void for_each_rows(const Body& body) const {
    int64_t r = 0;
    for (; r + kRowBlock <= plan_.rows; r += kRowBlock) body(Rows<kRowBlock>{}, r);
    for (; r < plan_.rows; ++r) body(Rows<1>{}, r);
  }

  // The scores of kRows rows and kKeys keys: kLanes vectors of sums, several for each score if there are fewer scores.
  // Scores of neighbouring keys are `stride` elements apart.
  template <int kRows, int kKeys>
  void dot_rows(const Storage* const* from, const T* query, T* scores, int64_t stride) const {
    constexpr int kScores = kRows * kKeys, kSums = kLanes<T> / kScores;
    const int64_t cols = p_.head_dim, width = padded<T>(cols);
    Vec<T> sum[kLanes<T>];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<T>; ++i) sum[i] = Vec<T>(T(0));
    const auto add = [&](int64_t d, int part, const auto& widened) {
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) {
        const Vec<T> x = widened(from[i] + d);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          Vec<T>& one = sum[part * kScores + r * kKeys + i];
          one = fma(x, load(query + r * width + d), one);
        }
      }
    };
    const auto whole = [](const Storage* x) { return widen_whole(x); };
    int64_t d = 0;
    for (; d + kSums * kLanes<T> <= cols; d += kSums * kLanes<T>)
#pragma GCC unroll 16
      for (int part = 0; part < kSums; ++part) add(d + part * kLanes<T>, part, whole);
    if constexpr (kSums > 1)
      for (; d + kLanes<T> <= cols; d += kLanes<T>) add(d, 0, whole);
    if (d < cols) add(d, 0, [&](const Storage* x) { return widen_some<T>(x, cols - d); });
    Vec<T> square[kLanes<T>];  // a copy: passed by reference, the sums would be kept in memory
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<T>; ++i) square[i] = sum[i];
    T lanes[kLanes<T>];
    store(lanes, sums_of(square));
#pragma GCC unroll 16
    for (int i = 0; i < kScores; ++i) {
      T score = lanes[i];
      for (int part = 1; part < kSums; ++part) score += lanes[part * kScores + i];
      scores[i / kKeys * kDecodeChunk + i % kKeys * stride] = score * T(kPower<Storage>);
    }
  }

  // Whether there is a NaN of E4M3 in the rows.
  SCALEDOT_NOINLINE static bool any_nan(const Values& rows, int64_t keys, int64_t cols) {
    using Bytes = Native<uint8_t>;
    Bytes largest = {};
    uint8_t of_rest = 0;
    for (int64_t k = 0; k < keys; ++k) {
      const Storage* row = rows.row(k);
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

  // Calls body(key, column) for each NaN of E4M3 in the rows.
  template <class Body>
  SCALEDOT_INLINE void for_each_nan(const Values& rows, int64_t keys, int64_t cols, const Body& body) const {
    if constexpr (__is_same(Storage, Float8E4M3)) {
      if (!any_nan(rows, keys, cols)) return;
      for (int64_t k = 0; k < keys; ++k)
        for (int64_t d = 0; d < cols; ++d)
          if ((rows.row(k)[d].bits | kSign) == kAllOnes) body(k, d);
    }
  }

  // What sums lack of E4M3: its power, and NaN.
  void end_sums(const Values& value, int64_t keys, const DecodeScratch<T>& s) const {
    if constexpr (kPower<Storage> != 1.0f)
      for (int64_t k = 0; k < plan_.rows * plan_.width; ++k) s.sums[k] *= kPower<Storage>;
    for_each_nan(value, keys, p_.value_dim, [&](int64_t k, int64_t d) {
      for (int64_t r = 0; r < plan_.rows; ++r)
        if (!is_skip(s.scores[r * kDecodeChunk + k])) s.sums[r * plan_.width + d] = T(__builtin_nanf(""));
    });
  }

  // Whether rows are fetched before the streams reach them. The CPU alone fetches too little ahead of quantised rows,
  // whose streams are short in bytes; and of rows that are apart in memory, as those of a packed cache of many heads.
  static bool fetches_ahead(const Problem& p, const TensorView& view, int64_t cols) {
    constexpr int64_t kSize = sizeof(Storage);
    if constexpr (kSize > kPrefetchedBytes) return false;
    return kSize == 1 || (view.row_stride > cols && p.key_length * view.row_stride * kSize >= kPrefetchFrom);
  }

  SCALEDOT_INLINE static void prefetch(const Values& rows, int64_t keys, int64_t step, int64_t cols) {
    constexpr int64_t kSize = sizeof(Storage);
    const Streams streams(keys);
    const int64_t later = step + kDecodeAhead / max(cols * kSize, kCacheLine);
    if (later >= streams.steps) return;
    for (int i = 0; i < kDecodeStreams; ++i) {
      const Storage* row = rows.row(min(streams.key(later, i), keys - 1));
      for (int64_t d = 0; d < cols; d += kCacheLine / kSize) __builtin_prefetch(row + d);
    }
  }

  // Inlined, it would take registers of the loops around it, also where it is not called.
  SCALEDOT_NOINLINE static void prefetch_apart(const Values& rows, int64_t keys, int64_t step, int64_t cols) {
    __asm__ volatile("");  // otherwise the compiler sees no effect, and leaves the call out
    prefetch(rows, keys, step, cols);
  }

  // `wanted`: see fetches_ahead.
  SCALEDOT_INLINE static void fetch_ahead(bool wanted, const Values& rows, int64_t keys, int64_t step, int64_t cols) {
    if constexpr (sizeof(Storage) == 1)
      prefetch(rows, keys, step, cols);
    else if constexpr (sizeof(Storage) <= kPrefetchedBytes)
      if (wanted) prefetch_apart(rows, keys, step, cols);
  }

  // One key of each stream, and the weights that kRows rows give these keys.
  template <int kRows>
  struct Step {
    const Storage* value[kDecodeStreams];
    T weight[kDecodeStreams][kRows];
  };

  template <int kRows>
  SCALEDOT_INLINE Step<kRows> step_of(const Values& value, int64_t keys, int64_t step, int64_t r,
                                      const DecodeScratch<T>& s) const {
    const Streams streams(keys);
    Step<kRows> now;
    for (int i = 0; i < kDecodeStreams; ++i) {
      const int64_t k = streams.key(step, i);
      now.value[i] = value.row(min(k, keys - 1));
      for (int one = 0; one < kRows; ++one)
        now.weight[i][one] = k < keys ? s.scores[(r + one) * kDecodeChunk + k] : kSkip<T>;
    }
    return now;
  }

  // Sets s.sums to 0, and calls body(step) for the steps of the streams.
  template <class Body>
  SCALEDOT_INLINE void for_each_step(const Values& value, int64_t keys, const DecodeScratch<T>& s,
                                     const Body& body) const {
    const Streams streams(keys);
    clear_row(s.sums, plan_.rows * plan_.width);
    for (int64_t step = 0; step < streams.steps; ++step) {
      fetch_ahead(fetch_values_, value, keys, step, p_.value_dim);
      body(step);
    }
  }

  template <int kRows, int kVectors, bool kSkipMasked, class Widen>
  SCALEDOT_INLINE void add_columns(const Step<kRows>& step, int64_t d, T* sums, const Widen& widened) const {
    const int64_t width = plan_.width;
    Vec<T> sum[kRows][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = load(sums + r * width + d + v * kLanes<T>);
    for (int i = 0; i < kDecodeStreams; ++i) {
      const T* weight = step.weight[i];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const Vec<T> x = widened(step.value[i] + d + v * kLanes<T>);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
          if (!kSkipMasked || !is_skip(weight[r])) sum[r][v] = fma(Vec<T>(weight[r]), x, sum[r][v]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store(sums + r * width + d + v * kLanes<T>, sum[r][v]);
  }

  const Problem& p_;
  const DecodePlan<T>& plan_;
  const bool fetch_keys_, fetch_values_;
};

}  // namespace
}  // namespace scaledot
