// The online softmax of one row, and the merge of two partial results over disjoint keys.
//
//   maximum = max_j s_j      sum = sum_j exp(s_j - maximum)      output = sum_j exp(s_j - maximum) v_j
//   lse = maximum + log(sum)                                     weights_j = exp(s_j - lse)
// Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
//
// A row with nothing to attend to has maximum -inf and sum 0. shift() keeps -inf - -inf from becoming NaN.
#pragma once

#include "core/math.h"

namespace scaledot {

template <class T>
struct RowState {
  T maximum;
  T sum;
};

template <class T>
SCALEDOT_FN RowState<T> empty_row() {
  return {-T(__builtin_inf()), T(0)};
}

// lse in two parts. The backward recomputes a probability as P = exp(score - offset - log_sum).
// Usually offset is lse and log_sum is 0. Rounding lse costs half a unit in its last place, which is too much where
// lse is large: with all keys at masked_score = -1e9, lse = -1e9 + log(keys) rounds to -1e9. The backward then
// recomputes the maximum (offset) and the logarithm of the sum (log_sum) from the scores.
// GPU kernels keep the logarithm. CPU kernels keep 1 / sum, which is more exact (RowSoftmax in backward_plan.h).
template <class T>
struct SplitLse {
  T offset;
  T log_sum;
};

// Up to this magnitude lse has the precision that float32 weights need. log(keys) alone stays below it.
constexpr double kPreciseLse = 16;

// The limit for weights that are rounded to 16 bits. Up to it a float32 lse is off by at most 2^-15; float16 rounds by
// up to 2^-12.
constexpr double kPreciseLse16 = 1000;

// True for NaN: recomputing it would not help.
template <class T>
SCALEDOT_FN bool lse_is_precise(T lse, double limit = kPreciseLse) {
  return !(lse > T(limit) || lse < T(-limit));
}

// Subtracted from scores before exp: the maximum, or 0 for an empty row, whose scores are all -inf.
template <class T>
SCALEDOT_FN T shift(T maximum) {
  return maximum == -T(__builtin_inf()) ? T(0) : maximum;
}

// Whether exp(scale x) may be computed as 2^(factor x), with factor = scale log2(e) in T, where x is a dot product or,
// for a masked key, -inf. The factor has to be positive, so that the largest product has the largest score, and may not
// underflow: -inf times 0 is NaN.
template <class T>
SCALEDOT_FN bool scale_folds_into_exp(double scale) {
  constexpr T kSmallestNormal = sizeof(T) == 4 ? T(0x1p-126) : T(0x1p-1022);
  const T factor = T(scale * kLog2e);
  return factor >= kSmallestNormal && factor < T(__builtin_inf());
}

// 1 / sum, or 0 for an empty row, so that its output is 0. NaN stays NaN.
template <class T>
SCALEDOT_FN T normaliser(RowState<T> row) {
  return row.sum == T(0) ? T(0) : T(1) / row.sum;
}

// The factor of the sum of weights times values. It is 0 for an empty row, even if `factor` is NaN.
template <class T>
SCALEDOT_FN T output_factor(RowState<T> row, T factor) {
  return row.sum == T(0) ? T(0) : normaliser(row) * factor;
}

template <class T>
SCALEDOT_FN T logsumexp(RowState<T> row) {
  return row.sum == T(0) ? -T(__builtin_inf()) : row.maximum + log(row.sum);
}

}  // namespace scaledot
