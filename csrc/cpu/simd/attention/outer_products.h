// The gradients of keys and values for few query rows: sums of outer products.
//
//   dM_j = factor sum_r W_rj X_r             dV: W = Pd, X = dO             dK: W = dX, X = Q
#pragma once

#include "cpu/simd/attention/decode_plan.h"

namespace scaledot {
namespace {

// Keys whose sums are in registers together. Each takes two vectors.
constexpr int kOuterKeys = kVectorRegisters / 4;

template <class Sum>
struct OuterProducts {
  const Sum* weights;  // W: (rows, kDecodeSplit)
  const Sum* rows;     // X: (rows, cols padded)
  int64_t count, cols;
  bool finite;  // otherwise weights that are kSkip are left out
};

// Rows j, ..., j + kOuterKeys - 1 of the sum, into `line`.
template <class Sum>
SCALEDOT_NOINLINE void sum_outer(const OuterProducts<Sum>& of, int64_t j, Sum* line) {
  constexpr int kVectors = 2;
  const int64_t width = padded<Sum>(of.cols);
  for (int64_t d = 0; d < width; d += kVectors * kLanes<Sum>) {
    Vec<Sum> sum[kOuterKeys][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kOuterKeys; ++i) sum[i][0] = sum[i][1] = Vec<Sum>(Sum(0));
    for (int64_t r = 0; r < of.count; ++r) {
      const Sum* const row = of.rows + r * width + d;
      const Sum* const weights = of.weights + r * kDecodeSplit + j;
      const Vec<Sum> first = load(row), second = load(row + kLanes<Sum>);
#pragma GCC unroll 16
      for (int i = 0; i < kOuterKeys; ++i) {
        const Vec<Sum> weight(weights[i]);
        sum[i][0] = fma(weight, first, sum[i][0]);
        sum[i][1] = fma(weight, second, sum[i][1]);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kOuterKeys; ++i) {
      store(line + i * width + d, sum[i][0]);
      store(line + i * width + d + kLanes<Sum>, sum[i][1]);
    }
  }
}

// Sums as sum_outer does, for weights that may be kSkip.
template <class Sum>
SCALEDOT_RARE void sum_live_outer(const OuterProducts<Sum>& of, int64_t j, Sum* line) {
  const int64_t width = padded<Sum>(of.cols);
  clear_row(line, kOuterKeys * width);
  for (int64_t r = 0; r < of.count; ++r)
    for (int i = 0; i < kOuterKeys; ++i) {
      const Sum weight = of.weights[r * kDecodeSplit + j + i];
      if (is_skip(weight)) continue;
      for (int64_t d = 0; d < width; d += kLanes<Sum>) {
        Sum* const sum = line + i * width + d;
        store(sum, fma(Vec<Sum>(weight), load(of.rows + r * width + d), load(sum)));
      }
    }
}

// Writes the gradient of these keys or values, unless it is not wanted. `line`: scratch for kOuterKeys rows.
template <class Storage, class Sum>
void store_outer(const Problem& p, const TensorView& to, const QueryTile& tile, Range keys,
                 const OuterProducts<Sum>& of, Sum factor, Sum* line) {
  if (!to.data) return;
  static_assert(kDecodeSplit % kOuterKeys == 0, "weights of whole blocks of keys can be read");
  Storage* const first = element_ptr<Storage>(p, to, tile.batch, tile.kv_head);
  for (int64_t j = 0; j < count(keys); j += kOuterKeys) {
    of.finite ? sum_outer(of, j, line) : sum_live_outer(of, j, line);
    for (int64_t i = 0; i < min<int64_t>(kOuterKeys, count(keys) - j); ++i)
      narrow_row(line + i * padded<Sum>(of.cols), factor, of.cols, first + (keys.begin + j + i) * to.row_stride);
  }
}

}  // namespace
}  // namespace scaledot
