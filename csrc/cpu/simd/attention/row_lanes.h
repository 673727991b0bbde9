// Dot products of many query rows with keys that lie in memory row by row: S^T = K Q^T, with vectors along the rows.
//
// Q is transposed once. An element of a key is multiplied with all rows at a time, so no sum goes across the lanes of a
// vector, and keys are not packed.
#pragma once

#include "cpu/simd/tiling.h"
#include "cpu/simd/transpose.h"

namespace scaledot {
namespace {

// Steps whose products are computed together (decode_plan.h), and their keys: a row then has a score for each lane.
template <class Sum>
constexpr int kGroupSteps = max(kLanes<Sum> / kDecodeStreams, 1);
template <class Sum>
constexpr int kGroupKeys = kDecodeStreams* kGroupSteps<Sum>;

// `rows`, rounded up to whole vectors; 0: they are too few for vectors along the rows.
template <class Sum>
int64_t row_lanes(int64_t rows) {
  return rows > max(kLanes<Sum> / 2, kDecodeRowBlock) ? round_up(rows, int64_t(kLanes<Sum>)) : 0;
}

// (rows, width) to (width, lanes). The lanes behind the last row are 0.
template <class Sum>
void transpose_rows(const Sum* from, int64_t rows, int64_t width, int64_t lanes, Sum* to) {
  for (int64_t r = 0; r < lanes; r += kLanes<Sum>)
    for (int64_t d = 0; d < width; d += kLanes<Sum>) {
      Vec<Sum> square[kLanes<Sum>];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes<Sum>; ++i)
        square[i] = r + i < rows ? load(from + (r + i) * width + d) : Vec<Sum>(Sum(0));
      transpose<Sum>(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes<Sum>; ++i) store(to + (d + i) * lanes + r, square[i]);
    }
}

// Keys whose products with kVectors vectors of rows are summed in registers together.
template <class Sum, int kVectors>
constexpr int kLaneKeys = min(kGroupKeys<Sum>, kLaneSums / kVectors);

// Products of kLaneKeys keys with kVectors vectors of rows, to sums[key][vector]. `columns`: of the transposed rows,
// which are `lanes` apart. A sum is made of sums of kShortSum columns each: with few rows, rounding errors hardly
// average out in the gradients of keys and values.
template <int kVectors, class Sum>
SCALEDOT_NOINLINE void multiply_lanes(const Sum* const* keys, int64_t cols, const Sum* columns, int64_t lanes,
                                      Sum* sums) {
  constexpr int kKeys = kLaneKeys<Sum, kVectors>;
  const Sum* key[kKeys];
#pragma GCC unroll 8
  for (int i = 0; i < kKeys; ++i) key[i] = keys[i];
  for (int64_t begin = 0; begin == 0 || begin < cols; begin += kShortSum) {
    Vec<Sum> sum[kKeys][kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[i][v] = Vec<Sum>(Sum(0));
    for (int64_t d = begin; d < min(begin + kShortSum, cols); ++d) {
      Vec<Sum> column[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) column[v] = load(columns + d * lanes + v * kLanes<Sum>);
#pragma GCC unroll 8
      for (int i = 0; i < kKeys; ++i) {
        const Vec<Sum> x(key[i][d]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[i][v] = fma(x, column[v], sum[i][v]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        Sum* const to = sums + (i * kVectors + v) * kLanes<Sum>;
        store(to, begin > 0 ? load(to) + sum[i][v] : sum[i][v]);
      }
  }
}

}  // namespace
}  // namespace scaledot
