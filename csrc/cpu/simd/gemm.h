// The one matrix product of all CPU kernels: C (+)= A B, on blocks that lie in scratch memory, in the compute type.
//
//   B is packed in panels of kPanel = 2 vectors of columns: element (k, j) at  panel[j / kPanel][k][j % kPanel].
//   A is read one number at a time and broadcast, so it can lie in any of three ways:
//     strips  packed strips of up to kStripRows rows, element (i, k) of a strip of R rows at  strip[k][i]
//     rows    row-major with rows of kTileKeys numbers: a tile of scores or weights
//     columns the transpose of that: how the backward reads a tile's weights to sum over queries
//   C is row-major.
// A strip of R rows and a panel are multiplied in registers: R x 2 vectors of sums. Every row's sums are taken in the
// same order whatever the strip, so a row's result does not depend on the rows beside it.
#pragma once

#include "cpu/simd/vec.h"

namespace scaledot {
namespace {

constexpr int kTileKeys = 128;  // keys in a tile of scores; a multiple of kDropoutGroup
constexpr int kTileRows = 56;   // rows in a tile: 4 strips of 14

template <class T>
constexpr int kPanel = 2 * kLanes<T>;

enum class Layout { strips, rows, columns };

// Strips get smaller towards the end of a block: kStripRows, then 8, 4, 2, 1.
inline int strip_rows(int64_t remaining) {
  if (remaining >= kStripRows) return kStripRows;
  return remaining >= 8 ? 8 : remaining >= 4 ? 4 : remaining >= 2 ? 2 : 1;
}

// One strip times one panel, of which the first kVectors vectors are computed.
template <class T, Layout kLayout, int kRows, int kVectors>
__attribute__((noinline)) void multiply_strip(int64_t depth, const T* __restrict a, const T* __restrict panel,
                                              T* __restrict c, int64_t c_stride, bool accumulate) {
  constexpr int64_t kRowStep = kLayout == Layout::rows ? kTileKeys : 1;
  constexpr int64_t kColStep = kLayout == Layout::strips ? kRows : kLayout == Layout::rows ? 1 : kTileKeys;
  Vec<T> sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sum[i][v] = Vec<T>(T(0));
  for (int64_t k = 0; k < depth; ++k) {
    Vec<T> b[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) b[v] = load(panel + k * kPanel<T> + v * kLanes<T>);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vec<T> x(a[i * kRowStep + k * kColStep]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[i][v] = multiply_add(x, b[v], sum[i][v]);
    }
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

template <class T, Layout kLayout, int kVectors>
SCALEDOT_INLINE void multiply_panel(int64_t rows, int64_t depth, const T* a, const T* panel, T* c, int64_t c_stride,
                                    bool accumulate) {
  for (int64_t i = 0; i < rows;) {
    const int strip = strip_rows(rows - i);
    const T* from = kLayout == Layout::strips ? a + i * depth : kLayout == Layout::rows ? a + i * kTileKeys : a + i;
    T* to = c + i * c_stride;
    switch (strip) {
      case kStripRows:
        multiply_strip<T, kLayout, kStripRows, kVectors>(depth, from, panel, to, c_stride, accumulate);
        break;
      case 8:
        multiply_strip < T, kLayout, kStripRows<8 ? 4 : 8, kVectors>(depth, from, panel, to, c_stride, accumulate);
        break;
      case 4: multiply_strip<T, kLayout, 4, kVectors>(depth, from, panel, to, c_stride, accumulate); break;
      case 2: multiply_strip<T, kLayout, 2, kVectors>(depth, from, panel, to, c_stride, accumulate); break;
      default: multiply_strip<T, kLayout, 1, kVectors>(depth, from, panel, to, c_stride, accumulate); break;
    }
    i += strip;
  }
}

// The same product, term by term, leaving out every term whose A is kSkip: used where B holds NaN or inf that a masked
// position must not see (0 * NaN is NaN). Rare, so it is slow and simple.
template <class T>
constexpr T kSkip = T(-0.0);

template <class T>
inline bool is_skip(T x) {
  return x == T(0) && __builtin_signbit(x);
}

template <class T>
SCALEDOT_INLINE Mask<T> skipped(Vec<T> x) {
  using Integers = Native<typename Lanes<T>::integer>;
  return {Integers(x.v) == Integers(Vec<T>(kSkip<T>).v)};
}

template <class T, Layout kLayout>
__attribute__((noinline)) void multiply_live(int64_t rows, int64_t cols, int64_t depth, const T* a, const T* panels,
                                             int64_t panel_stride, T* c, int64_t c_stride, bool accumulate) {
  static_assert(kLayout != Layout::strips, "only weights and score gradients can be masked");
  for (int64_t i = 0; i < rows; ++i) {
    T* out = c + i * c_stride;
    for (int64_t j = 0; j < cols && !accumulate; ++j) out[j] = T(0);
    for (int64_t k = 0; k < depth; ++k) {
      const T x = kLayout == Layout::rows ? a[i * kTileKeys + k] : a[k * kTileKeys + i];
      if (is_skip(x)) continue;
      for (int64_t j = 0; j < cols; ++j)
        out[j] += x * panels[j / kPanel<T> * panel_stride + k * kPanel<T> + j % kPanel<T>];
    }
  }
}

// B: `depth` packed rows of `cols` columns, panels panel_stride numbers apart.
template <class T>
struct Panels {
  T* data;
  int64_t stride;
  bool finite;
};

// C[rows][cols] (+)= A[rows][depth] B[depth][cols]. C's columns are written up to a multiple of a vector.
template <Layout kLayout, class T>
SCALEDOT_INLINE void multiply(int64_t rows, int64_t cols, int64_t depth, const T* a, const Panels<T>& b, T* c,
                              int64_t c_stride, bool accumulate) {
  if constexpr (kLayout != Layout::strips) {
    if (!b.finite) return multiply_live<T, kLayout>(rows, cols, depth, a, b.data, b.stride, c, c_stride, accumulate);
  }
  for (int64_t j = 0; j < cols; j += kPanel<T>) {
    const T* panel = b.data + j / kPanel<T> * b.stride;
    if (cols - j > kLanes<T>)
      multiply_panel<T, kLayout, 2>(rows, depth, a, panel, c + j, c_stride, accumulate);
    else
      multiply_panel<T, kLayout, 1>(rows, depth, a, panel, c + j, c_stride, accumulate);
  }
}

}  // namespace
}  // namespace scaledot
