// The online softmax of one row, and the merge of two partial results over disjoint keys.
//
//   maximum = max_j s_j      sum = sum_j exp(s_j - maximum)      output = sum_j exp(s_j - maximum) v_j
//   lse = maximum + log(sum)                                     weights_j = exp(s_j - lse)
// Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
//
// A row with nothing to attend to has maximum -inf and sum 0; shift() keeps -inf - -inf from becoming NaN.
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

// What to subtract from a score before exp: the maximum, or 0 for an empty row (whose scores are all -inf).
template <class T>
SCALEDOT_FN T shift(T maximum) {
  return maximum == -T(__builtin_inf()) ? T(0) : maximum;
}

// 1 / sum, and 0 for an empty row, so that an empty row's output is 0. NaN stays NaN.
template <class T>
SCALEDOT_FN T normaliser(RowState<T> row) {
  return row.sum == T(0) ? T(0) : T(1) / row.sum;
}

template <class T>
SCALEDOT_FN T logsumexp(RowState<T> row) {
  return row.sum == T(0) ? -T(__builtin_inf()) : row.maximum + log(row.sum);
}

}  // namespace scaledot
