// The one matrix product of all CPU kernels: C (+)= factor * A * B, on blocks in scratch memory.
//
//   A and B are made of operands: float, double, or Bf16Pair (bf16_pairs.h). A Bf16Pair is two bfloat16 that are
//   neighbours along the depth K of the product; one instruction multiplies and adds both. C and its sums have the
//   type SumOf<Operand>.
//   B is in panels of kPanel columns (two vectors): depth k, column j at  panel[j / kPanel][k][j % kPanel]. Packed, the
//   depths of a panel are kPanel apart. A matrix of whole vectors is in panels as it lies: its depths are a row apart.
//   A is read one operand at a time and broadcast, so it can have two layouts:
//     rows     row i, depth k at  a[i][k],  rows kRowStride apart. A depth of more than kBlockDepth is stored in blocks
//              of kTileRows rows:  a[k / kBlockDepth][i][k % kBlockDepth]
//     columns  row i, depth k at  a[k][i],  depths kColumnStride apart: how the backward sums over queries
//   C is row-major.
// The micro-kernel computes kMicroRows rows x one panel in registers. It sums each row in the same order for any number
// of rows, so a row's result does not depend on its neighbours.
#pragma once

#include "cpu/simd/tiling.h"
#include "cpu/simd/vec.h"

namespace scaledot {
namespace {

// How an operand is made from elements. Here an operand is one element; bf16_pairs.h has the other case.
template <class Operand>
struct OperandTraits {
  using Sum = Operand;
  using Element = Operand;
  static constexpr int kElements = 1;  // in an operand

  static Operand element(Operand x, int) { return x; }
  // The kLanes operands from `depth` on, of one row of elements.
  SCALEDOT_INLINE static Vec<Operand> along_row(const Operand* row, int64_t depth) { return load(row + depth); }
  // kLanes operands, each made from one column of kElements rows. Rows are `width` elements apart.
  SCALEDOT_INLINE static Vec<Operand> across_rows(const Operand* rows, int64_t) { return load(rows); }
  // The two inverse functions, for results: to elements k, k + 1, ... of a row; from one vector of each of kElements
  // rows.
  SCALEDOT_INLINE static void store_along(Operand* row, int64_t k, Vec<Operand> x) { store(row + k, x); }
  SCALEDOT_INLINE static void store_across(Operand* columns, const Vec<Operand>* x) { store(columns, *x); }
};
template <class Operand>
using SumOf = typename OperandTraits<Operand>::Sum;
template <class Operand>
using ElementOf = typename OperandTraits<Operand>::Element;
template <class Operand>
constexpr int kElements = OperandTraits<Operand>::kElements;
template <class Operand>
constexpr bool kHasBf16Pairs = (kElements<Operand> > 1);

// The depth of a product is a multiple of this many operands: the tile unit has no shorter step. Packing adds zeros.
template <class Operand>
constexpr int kDepthStep = kHasTileUnit&& kHasBf16Pairs<Operand> ? kUnitSide : 1;

// Operands along the depth that hold this many elements.
template <class Operand>
inline int64_t depth_of(int64_t elements) {
  return round_up(ceil_div(elements, int64_t(kElements<Operand>)), int64_t(kDepthStep<Operand>));
}
// Elements that these operands have room for.
template <class Operand>
inline int64_t padded_depth(int64_t elements) {
  return depth_of<Operand>(elements) * kElements<Operand>;
}

template <class Operand>
constexpr int kPanel = kPanelVectors* kLanes<SumOf<Operand>>;
template <class Operand>
constexpr int kBlockDepth = kTileKeys / kElements<Operand>;
// Strides are one cache line longer than a row. Otherwise the rows of a micro-tile would share a few sets of the cache.
template <class Operand>
constexpr int kRowStride = kBlockDepth<Operand> + int(kCacheLine / sizeof(Operand));
template <class Operand>
constexpr int kColumnStride = kTileKeys + int(kCacheLine / sizeof(Operand));

enum class Layout { rows, columns };

// Rows of the next micro-tile: kMicroRows, and towards the end of a block 8 (if kMicroRows is more), 4, 2, 1.
inline int next_micro_rows(int64_t remaining) {
  const bool halves = kMicroRows > 8 && remaining == 16;  // 8 + 8 rather than 14 + 2
  if (remaining >= kMicroRows && !halves) return kMicroRows;
  return remaining >= 8 ? 8 : remaining >= 4 ? 4 : remaining >= 2 ? 2 : 1;
}

// One micro-tile: kRows rows of A times the first kVectors vectors of a panel.
template <class Operand, Layout kLayout, int kRows, int kVectors>
SCALEDOT_NOINLINE void micro_kernel(int64_t depth, const Operand* __restrict a, const Operand* __restrict panel,
                                    int64_t panel_row, SumOf<Operand>* __restrict c, int64_t c_stride,
                                    SumOf<Operand> factor, bool accumulate) {
  using T = SumOf<Operand>;
  constexpr int64_t kNextRow = kLayout == Layout::rows ? kRowStride<Operand> : 1;
  constexpr int64_t kNextDepth = kLayout == Layout::rows ? 1 : kColumnStride<Operand>;
  Vec<T> sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sum[i][v] = Vec<T>(T(0));
  for (int64_t k = 0; k < depth; ++k) {
    Vec<Operand> b[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) b[v] = load(panel + k * panel_row + v * kLanes<T>);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vec<Operand> x(a[i * kNextRow + k * kNextDepth]);
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
  // C is added last: a long sum is then made of short ones and loses fewer bits than a single chain.
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      T* to = c + i * c_stride + v * kLanes<T>;
      store(to, accumulate ? load(to) + sum[i][v] : sum[i][v]);
    }
}

template <class Operand, Layout kLayout, int kVectors>
SCALEDOT_INLINE void multiply_panel(int64_t rows, int64_t depth, const Operand* a, const Operand* panel,
                                    int64_t panel_row, SumOf<Operand>* c, int64_t c_stride, SumOf<Operand> factor,
                                    bool accumulate) {
  constexpr int kHalf = kMicroRows > 8 ? 8 : 4;  // with 6 rows, no micro-tile has 8
  for (int64_t i = 0; i < rows;) {
    const int now = next_micro_rows(rows - i);
    const Operand* from = a + i * (kLayout == Layout::rows ? kRowStride<Operand> : 1);
    SumOf<Operand>* to = c + i * c_stride;
    switch (now) {
      case kMicroRows:
        micro_kernel<Operand, kLayout, kMicroRows, kVectors>(depth, from, panel, panel_row, to, c_stride, factor,
                                                             accumulate);
        break;
      case 8:
        micro_kernel<Operand, kLayout, kHalf, kVectors>(depth, from, panel, panel_row, to, c_stride, factor,
                                                        accumulate);
        break;
      case 4:
        micro_kernel<Operand, kLayout, 4, kVectors>(depth, from, panel, panel_row, to, c_stride, factor, accumulate);
        break;
      case 2:
        micro_kernel<Operand, kLayout, 2, kVectors>(depth, from, panel, panel_row, to, c_stride, factor, accumulate);
        break;
      default:
        micro_kernel<Operand, kLayout, 1, kVectors>(depth, from, panel, panel_row, to, c_stride, factor, accumulate);
        break;
    }
    i += now;
  }
}

// Marks a masked weight or gradient in A where B holds NaN or inf: 0 * NaN would be NaN, so the term has to be left
// out. The mark is -0, which no live weight or gradient is (mark_masked in attention/masking.h).
template <class T>
constexpr T kSkip = T(-0.0);

template <class T>
inline bool is_skip(T x) {
  return x == T(0) && __builtin_signbit(x);
}

template <class Operand>
struct Products;

// The product for a B that is not finite: term by term, without the terms whose A is kSkip. Rare, so it is slow and
// simple.
template <class Operand, Layout kLayout>
SCALEDOT_RARE void multiply_live(int64_t rows, int64_t cols, int64_t depth, const Operand* a, const Operand* panels,
                                 int64_t panel_stride, SumOf<Operand>* c, int64_t c_stride, SumOf<Operand> factor,
                                 bool accumulate) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) {
      const Operand* column = panels + j / kPanel<Operand> * panel_stride + j % kPanel<Operand>;
      const Operand* row = a + i * (kLayout == Layout::rows ? kRowStride<Operand> : 1);
      constexpr int64_t kNextDepth = kLayout == Layout::rows ? 1 : kColumnStride<Operand>;
      Products<Operand>::template multiply_live<kNextDepth>(depth, row, column, c[i * c_stride + j], factor,
                                                            accumulate);
    }
}

// B in panels, which are `stride` operands apart.
template <class Operand>
struct Panels {
  Operand* data;
  int64_t stride;
  bool finite;                           // no element is NaN or inf
  int64_t row_stride = kPanel<Operand>;  // from depth to depth

  Panels from_depth(int64_t depth) const { return {data + depth * row_stride, stride, finite, row_stride}; }
  Panels from_column(int64_t column) const {
    return {data + column / kPanel<Operand> * stride, stride, finite, row_stride};
  }
};

// The products in registers: of a finite B, and of a row of A with a column of B. tile_unit.h has those of the tile
// unit. Both sum in the same order, so a key that is masked changes no bit, finite or not.
template <class Operand>
struct Products {
  using T = SumOf<Operand>;

  template <Layout kLayout>
  SCALEDOT_INLINE static void multiply(int64_t rows, int64_t cols, int64_t depth, const Operand* a,
                                       const Panels<Operand>& b, T* c, int64_t c_stride, bool accumulate, T factor) {
    for (int64_t first = 0; first == 0 || first < depth;
         first += kBlockDepth<Operand>) {  // once even for depth 0: C is 0
      const int64_t now = min<int64_t>(depth - first, kBlockDepth<Operand>);
      for (int64_t j = 0; j < cols; j += kPanel<Operand>) {
        const Operand* panel = b.data + j / kPanel<Operand> * b.stride + first * b.row_stride;
        if (cols - j > kLanes<T>)
          multiply_panel<Operand, kLayout, 2>(rows, now, a, panel, b.row_stride, c + j, c_stride, factor,
                                              accumulate || first > 0);
        else
          multiply_panel<Operand, kLayout, 1>(rows, now, a, panel, b.row_stride, c + j, c_stride, factor,
                                              accumulate || first > 0);
      }
      a += kLayout == Layout::rows ? kTileRows * kRowStride<Operand> : kBlockDepth<Operand> * kColumnStride<Operand>;
    }
  }

  template <int64_t kNextDepth>
  SCALEDOT_INLINE static void multiply_live(int64_t depth, const Operand* row, const Operand* column, T& to, T factor,
                                            bool accumulate) {
    T sum = 0;
    for (int64_t k = 0; k < depth; ++k)
      for (int part = 0; part < kElements<Operand>; ++part) {
        const T term = OperandTraits<Operand>::element(row[k * kNextDepth], part);
        if (!is_skip(term)) sum += term * OperandTraits<Operand>::element(column[k * kPanel<Operand>], part);
      }
    to = accumulate ? to + factor * sum : factor * sum;
  }
};

// How the product treats masked elements of A. Weights and gradients of scores can be masked; queries and gradients
// of outputs cannot.
enum class OnMasked { multiply, skip };

// C[rows][cols] (+)= factor * A[rows][depth] * B[depth][cols]. Writes C's columns up to a multiple of a vector.
template <Layout kLayout, OnMasked kOnMasked, class Operand>
SCALEDOT_INLINE void multiply(int64_t rows, int64_t cols, int64_t depth, const Operand* a, const Panels<Operand>& b,
                              SumOf<Operand>* c, int64_t c_stride, bool accumulate, SumOf<Operand> factor = 1) {
  if constexpr (kOnMasked == OnMasked::skip) {
    if (!b.finite)
      return multiply_live<Operand, kLayout>(rows, cols, depth, a, b.data, b.stride, c, c_stride, factor, accumulate);
  }
  Products<Operand>::template multiply<kLayout>(rows, cols, depth, a, b, c, c_stride, accumulate, factor);
}

}  // namespace
}  // namespace scaledot
