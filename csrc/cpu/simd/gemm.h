// The one matrix product of all CPU kernels: C (+)= factor A B, on blocks that lie in scratch memory.
//
//   A and B are made of operands E: float, double, or Pair, two bfloat16 that are neighbours along the depth of the product and
//   are multiplied and added in one step (pairs.h). Sums, and C, are of SumOf<E>.
//   B is packed in panels of kPanel = 2 vectors of columns: step k, column j at  panel[j / kPanel][k][j % kPanel].
//   A is read one operand at a time and broadcast, so it can lie in two ways:
//     rows     row i, step k at  a[i][k],  rows kRowStride apart; of more than kBlockDepth steps, kTileRows rows at a time:
//              a[k / kBlockDepth][i][k % kBlockDepth]
//     columns  row i, step k at  a[k][i],  steps kColumnStride apart: how the backward sums over queries
//   C is row-major.
// A strip of rows and a panel are multiplied in registers: kMicroRows x 2 vectors of sums. Every row's sums are taken in the
// same order whatever the strip, so a row's result does not depend on the rows beside it.
#pragma once

#include "cpu/simd/vec.h"

namespace scaledot {
namespace {

constexpr int kTileKeys = 128;  // keys in a tile of scores; a multiple of kDropoutGroup
constexpr int kTileRows = kMicroRows * (kMicroRows < 8 ? 8 : 4);  // rows in a tile at most: 4 strips of 14 or 8 of 6
constexpr int64_t kCacheLine = 64;

// What products are made of. This one is a plain number; pairs.h has the other.
template <class E>
struct OperandTraits {
  using Sum = E;
  using Element = E;                   // what a row of operands is made from
  static constexpr int kElements = 1;  // in an operand

  static E number(E x, int) { return x; }
  // Operands `step`, step + 1, ... of a row of numbers.
  SCALEDOT_INLINE static Vec<E> along_row(const E* row, int64_t step) { return load(row + step); }
  // Operands made of the same columns of kElements rows, `width` numbers apart.
  SCALEDOT_INLINE static Vec<E> across_rows(const E* rows, int64_t) { return load(rows); }
  // The same two from results: numbers k, k + 1, ... of a row of operands; one vector from each of kElements rows.
  SCALEDOT_INLINE static void store_along(E* row, int64_t k, Vec<E> x) { store(row + k, x); }
  SCALEDOT_INLINE static void store_across(E* columns, const Vec<E>* x) { store(columns, *x); }
};
template <class E>
using SumOf = typename OperandTraits<E>::Sum;
template <class E>
using ElementOf = typename OperandTraits<E>::Element;
template <class E>
constexpr int kElements = OperandTraits<E>::kElements;

template <class E>
inline int64_t depth_of(int64_t numbers) {
  return ceil_div(numbers, int64_t(kElements<E>));
}

template <class E>
constexpr int kPanel = 2 * kLanes<SumOf<E>>;
// A cache line longer than the row, so that the rows of a strip do not all fall into the same few sets of the cache.
template <class E>
constexpr int kBlockDepth = kTileKeys / kElements<E>;
template <class E>
constexpr int kRowStride = kBlockDepth<E> + int(kCacheLine / sizeof(E));
template <class E>
constexpr int kColumnStride = kTileKeys + int(kCacheLine / sizeof(E));

enum class Layout { rows, columns };

// Strips get smaller towards the end of a block: kMicroRows, then 8 (if kMicroRows is more), 4, 2, 1.
inline int micro_rows(int64_t remaining) {
  const bool halves = kMicroRows > 8 && remaining == 16;  // 8 + 8 rather than 14 + 2
  if (remaining >= kMicroRows && !halves) return kMicroRows;
  return remaining >= 8 ? 8 : remaining >= 4 ? 4 : remaining >= 2 ? 2 : 1;
}

// One strip times one panel, of which the first kVectors vectors are computed.
template <class E, Layout kLayout, int kRows, int kVectors>
__attribute__((noinline)) void micro_kernel(int64_t steps, const E* __restrict a, const E* __restrict panel,
                                              SumOf<E>* __restrict c, int64_t c_stride, SumOf<E> factor,
                                              bool accumulate) {
  using T = SumOf<E>;
  constexpr int64_t kRowStep = kLayout == Layout::rows ? kRowStride<E> : 1;
  constexpr int64_t kColStep = kLayout == Layout::rows ? 1 : kColumnStride<E>;
  Vec<T> sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sum[i][v] = Vec<T>(T(0));
  for (int64_t k = 0; k < steps; ++k) {
    Vec<E> b[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) b[v] = load(panel + k * kPanel<E> + v * kLanes<T>);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vec<E> x(a[i * kRowStep + k * kColStep]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[i][v] = fma(x, b[v], sum[i][v]);
    }
  }
  if (factor != T(1)) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[i][v] = sum[i][v] * Vec<T>(factor);
  }
  // What C holds is added last, so that a long sum is made of short ones and loses fewer bits than a single chain would.
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      T* to = c + i * c_stride + v * kLanes<T>;
      store(to, accumulate ? load(to) + sum[i][v] : sum[i][v]);
    }
}

template <class E, Layout kLayout, int kVectors>
SCALEDOT_INLINE void multiply_panel(int64_t rows, int64_t steps, const E* a, const E* panel, SumOf<E>* c,
                                    int64_t c_stride, SumOf<E> factor, bool accumulate) {
  for (int64_t i = 0; i < rows;) {
    const int strip = micro_rows(rows - i);
    const E* from = a + i * (kLayout == Layout::rows ? kRowStride<E> : 1);
    SumOf<E>* to = c + i * c_stride;
    switch (strip) {
      case kMicroRows:
        micro_kernel<E, kLayout, kMicroRows, kVectors>(steps, from, panel, to, c_stride, factor, accumulate);
        break;
      case 8:
        micro_kernel < E, kLayout,
            kMicroRows<8 ? 4 : 8, kVectors>(steps, from, panel, to, c_stride, factor, accumulate);
        break;
      case 4: micro_kernel<E, kLayout, 4, kVectors>(steps, from, panel, to, c_stride, factor, accumulate); break;
      case 2: micro_kernel<E, kLayout, 2, kVectors>(steps, from, panel, to, c_stride, factor, accumulate); break;
      default: micro_kernel<E, kLayout, 1, kVectors>(steps, from, panel, to, c_stride, factor, accumulate); break;
    }
    i += strip;
  }
}

// What stands in A at masked positions where B holds NaN or inf that they must not see (0 * NaN is NaN): -0, which no live weight
// or gradient of A is (scores.h, mark_masked).
template <class T>
constexpr T kSkip = T(-0.0);

template <class T>
inline bool is_skip(T x) {
  return x == T(0) && __builtin_signbit(x);
}

// The product where B is not finite: term by term, leaving out every term whose A is kSkip. Rare, so it is slow and simple.
template <class E, Layout kLayout>
__attribute__((noinline)) void multiply_live(int64_t rows, int64_t cols, int64_t steps, const E* a, const E* panels,
                                             int64_t panel_stride, SumOf<E>* c, int64_t c_stride, SumOf<E> factor,
                                             bool accumulate) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) {
      const E* column = panels + j / kPanel<E> * panel_stride + j % kPanel<E>;
      SumOf<E> sum = 0;  // in the order of micro_kernel
      for (int64_t k = 0; k < steps; ++k) {
        const E x = kLayout == Layout::rows ? a[i * kRowStride<E> + k] : a[k * kColumnStride<E> + i];
        for (int part = 0; part < kElements<E>; ++part) {
          const SumOf<E> term = OperandTraits<E>::number(x, part);
          if (!is_skip(term)) sum += term * OperandTraits<E>::number(column[k * kPanel<E>], part);
        }
      }
      SumOf<E>& to = c[i * c_stride + j];
      to = accumulate ? to + factor * sum : factor * sum;
    }
}

// B: `steps` packed rows of columns, panels panel_stride operands apart.
template <class E>
struct PackedPanels {
  E* data;
  int64_t stride;
  bool finite;

  PackedPanels from_depth(int64_t step) const { return {data + step * kPanel<E>, stride, finite}; }
  PackedPanels from_column(int64_t column) const { return {data + column / kPanel<E> * stride, stride, finite}; }
};

// Whether A may hold kSkip: weights and gradients of scores can be masked, queries and gradients of outputs cannot.
enum class OnMasked { all, live };

// C[rows][cols] (+)= factor A[rows][steps] B[steps][cols]. C's columns are written up to a multiple of a vector.
template <Layout kLayout, OnMasked kTerms, class E>
SCALEDOT_INLINE void multiply(int64_t rows, int64_t cols, int64_t steps, const E* a, const PackedPanels<E>& b, SumOf<E>* c,
                              int64_t c_stride, bool accumulate, SumOf<E> factor = 1) {
  if constexpr (kTerms == OnMasked::live) {
    if (!b.finite)
      return multiply_live<E, kLayout>(rows, cols, steps, a, b.data, b.stride, c, c_stride, factor, accumulate);
  }
  for (int64_t first = 0; first == 0 || first < steps; first += kBlockDepth<E>) {  // once even without steps: C becomes 0
    const int64_t now = min<int64_t>(steps - first, kBlockDepth<E>);
    for (int64_t j = 0; j < cols; j += kPanel<E>) {
      const E* panel = b.data + j / kPanel<E> * b.stride + first * kPanel<E>;
      if (cols - j > kLanes<SumOf<E>>)
        multiply_panel<E, kLayout, 2>(rows, now, a, panel, c + j, c_stride, factor, accumulate || first > 0);
      else
        multiply_panel<E, kLayout, 1>(rows, now, a, panel, c + j, c_stride, factor, accumulate || first > 0);
    }
    a += kLayout == Layout::rows ? kTileRows * kRowStride<E> : kBlockDepth<E> * kColumnStride<E>;
  }
}

}  // namespace
}  // namespace scaledot
