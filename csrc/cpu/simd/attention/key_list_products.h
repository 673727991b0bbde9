// The three products of attention to lists of keys (key_lists.h), on keys and values that are read in place. With AMX,
// key_list_tiles.h has them for bfloat16.
//
//   dots      S[r][e] = A[r] . B[k_e]            weigh     C[r] = sum_e W[r][e] B[k_e]
//   scatter   C[k_e] += sum_r W[r][e] A[r]       in the order of the entries e
// A has a row for each query head, B one for each key; k_e is the key of entry e. The order of a sum depends neither on
// the number of rows nor on the row, so a row has the same bits in any call.
#pragma once

#include "cpu/simd/attention/decode_products.h"

namespace scaledot {
namespace {

// Keys of a list.
struct ListedKeys {
  const int32_t* keys;
  int64_t count;
};

// Rows of key or value of one head.
template <class Storage>
struct ListedRows {
  const Storage* data;
  int64_t row_stride;
  int64_t cols;

  const Storage* row(int64_t key) const { return data + key * row_stride; }
};

template <class Storage>
class ListProducts {
  using Sum = typename Compute<Storage>::type;
  static constexpr int kRows = kLanes<Sum> < kDecodeRowBlock ? kLanes<Sum> : kDecodeRowBlock;

 public:
  using Rows = ListedRows<Storage>;
  static constexpr int64_t kPiece = kListPiece;      // keys that are multiplied with all heads at a time
  static constexpr int64_t kQueries = kListQueries;  // of a tile

  ListProducts(int64_t, int64_t, char*) {}
  static int64_t room(int64_t, int64_t) { return 0; }  // scratch memory

  // `a`: (rows, cols padded). `scores`: rows of `stride` elements; padding after the last entry is overwritten.
  static void dots(const ListedKeys& list, const Rows& b, const Sum* a, int64_t rows, Sum* scores, int64_t stride) {
    const int64_t width = padded<Sum>(b.cols);
    for_each_rows(rows, [&](auto block, int64_t r) {
      constexpr int kKeys = kLanes<Sum> / block.rows;
      for (int64_t e = 0; e < list.count; e += kKeys) {
        dot_block<block.rows, kKeys>(list, b, e, a + r * width, width, scores + r * stride + e, stride);
      }
    });
  }

  // `weights`: rows of `stride` elements. `sums`: (rows, cols padded), added to. The last argument is for products that
  // would round weights.
  static void weigh(const ListedKeys& list, const Rows& b, const Sum* weights, int64_t stride, int64_t rows, Sum* sums,
                    bool) {
    const int64_t width = padded<Sum>(b.cols);
    for_each_rows(rows, [&](auto block, int64_t r) {
      constexpr int kVectors = kDecodeValueVectors / block.rows;
      const Sum* w = weights + r * stride;
      Sum* to = sums + r * width;
      int64_t d = 0;
      for (; d + kVectors * kLanes<Sum> <= b.cols; d += kVectors * kLanes<Sum>)
        add_columns<block.rows, kVectors>(list, b, w, stride, to + d, width, d,
                                          [](const Storage* x) { return widen_load(x); });
      for (; d < b.cols; d += kLanes<Sum>)
        add_columns<block.rows, 1>(list, b, w, stride, to + d, width, d,
                                   [&](const Storage* x) { return widen_some<Sum>(x, b.cols - d); });
    });
  }

  // `c`: (keys, cols padded). `weights` and `a` as above.
  static void scatter(const ListedKeys& list, const Sum* weights, int64_t stride, const Sum* a, int64_t rows,
                      int64_t cols, Sum* c) {
    constexpr int kVectors = kDecodeValueVectors;
    const int64_t width = padded<Sum>(cols);
    for (int64_t e = 0; e < list.count; ++e) {
      Sum* to = c + list.keys[e] * width;
      int64_t d = 0;
      for (; d + kVectors * kLanes<Sum> <= width; d += kVectors * kLanes<Sum>)
        add_rows<kVectors>(weights + e, stride, a + d, rows, width, to + d);
      for (; d < width; d += 2 * kLanes<Sum>) add_rows<2>(weights + e, stride, a + d, rows, width, to + d);
    }
  }

  // Rows of a list are far from each other in memory, and the CPU does not fetch them by itself. Without the assembly
  // gcc 12 sees no effect, and leaves calls out.
  template <class T>
  SCALEDOT_NOINLINE static void prefetch(const ListedKeys& list, const T* rows, int64_t row_stride, int64_t cols) {
    __asm__ volatile("");
    for (int64_t e = 0; e < list.count; ++e)
      for (int64_t d = 0; d < cols; d += kCacheLine / int64_t(sizeof(T)))
        __builtin_prefetch(rows + list.keys[e] * row_stride + d);
  }

 private:
  template <int kCount>
  struct Block {
    static constexpr int rows = kCount;
  };

  // Calls body(Block<n>{}, first row) for blocks of rows.
  template <class Body>
  static void for_each_rows(int64_t rows, const Body& body) {
    int64_t r = 0;
    for (; r + kRows <= rows; r += kRows) body(Block<kRows>{}, r);
    for (; r < rows; ++r) body(Block<1>{}, r);
  }

  // kRows rows times kKeys entries: kLanes vectors of sums. Past the end, the last entry again.
  template <int kBlock, int kKeys>
  SCALEDOT_INLINE static void dot_block(const ListedKeys& list, const Rows& b, int64_t e, const Sum* a, int64_t width,
                                        Sum* scores, int64_t stride) {
    static_assert(kBlock * kKeys == kLanes<Sum>);
    const Storage* from[kKeys];
    for (int k = 0; k < kKeys; ++k) from[k] = b.row(list.keys[min(e + k, list.count - 1)]);
    Vec<Sum> sum[kLanes<Sum>];
#pragma GCC unroll 16
    for (int k = 0; k < kLanes<Sum>; ++k) sum[k] = Vec<Sum>(Sum(0));
    const auto add = [&](int64_t d, const auto& widened) {
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) {
        const Vec<Sum> x = widened(from[k] + d);
#pragma GCC unroll 4
        for (int r = 0; r < kBlock; ++r) sum[r * kKeys + k] = fma(x, load(a + r * width + d), sum[r * kKeys + k]);
      }
    };
    int64_t d = 0;
    for (; d + kLanes<Sum> <= b.cols; d += kLanes<Sum>) add(d, [](const Storage* x) { return widen_load(x); });
    if (d < b.cols) add(d, [&](const Storage* x) { return widen_some<Sum>(x, b.cols - d); });
    const Vec<Sum> dots = sums_of(sum);
    if constexpr (kBlock == 1) {
      store(scores, dots);
    } else {
      Sum lanes[kLanes<Sum>];
      store(lanes, dots);
      for (int r = 0; r < kBlock; ++r)
        for (int k = 0; k < kKeys; ++k) scores[r * stride + k] = lanes[r * kKeys + k];
    }
  }

  template <int kBlock, int kVectors, class Widen>
  SCALEDOT_INLINE static void add_columns(const ListedKeys& list, const Rows& b, const Sum* weights, int64_t stride,
                                          Sum* sums, int64_t width, int64_t d, const Widen& widened) {
    Vec<Sum> sum[kBlock][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kBlock; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = load(sums + r * width + v * kLanes<Sum>);
    for (int64_t e = 0; e < list.count; ++e) {
      const Storage* from = b.row(list.keys[e]) + d;
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const Vec<Sum> x = widened(from + v * kLanes<Sum>);
#pragma GCC unroll 4
        for (int r = 0; r < kBlock; ++r) sum[r][v] = fma(Vec<Sum>(weights[r * stride + e]), x, sum[r][v]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kBlock; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store(sums + r * width + v * kLanes<Sum>, sum[r][v]);
  }

  template <int kVectors>
  SCALEDOT_INLINE static void add_rows(const Sum* weights, int64_t stride, const Sum* a, int64_t rows, int64_t width,
                                       Sum* to) {
    Vec<Sum> sum[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[v] = load(to + v * kLanes<Sum>);
    for (int64_t r = 0; r < rows; ++r) {
      const Vec<Sum> w(weights[r * stride]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[v] = fma(w, load(a + r * width + v * kLanes<Sum>), sum[v]);
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(to + v * kLanes<Sum>, sum[v]);
  }
};

}  // namespace
}  // namespace scaledot
