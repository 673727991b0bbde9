// The online softmax of a tile's rows (core/softmax.h), in the unit of their scores.
//
//   m' = max(m, max_j S_j)      P_j = exp(S_j - m')      l = l exp(m - m') + sum_j P_j      O = O exp(m - m')
// m' is a row's reference. It follows the maximum lazily: it is raised only if a score exceeds it by more than kSlack,
// so that l and O are seldom rescaled.
#pragma once

#include "cpu/simd/attention/scores.h"

namespace scaledot {
namespace {

constexpr double kSlack = 8;  // in powers of two: weights stay below 2^8

template <class T>
struct SoftmaxRows {
  T* reference;  // -inf: no key so far
  T* limit;      // a score above this raises the reference
  T* sum;        // l, kLanes partial sums a row
};

template <class T>
SoftmaxRows<T> lay_out_softmax(Arena& arena, int64_t rows) {
  return {take<T>(arena, rows), take<T>(arena, rows), take<T>(arena, rows * kLanes<T>)};
}

template <class T>
inline SoftmaxRows<T> from_row(const SoftmaxRows<T>& rows, int64_t r) {
  return {rows.reference + r, rows.limit + r, rows.sum + r * kLanes<T>};
}

template <class T>
inline void reset(const SoftmaxRows<T>& rows, int64_t r) {
  rows.reference[r] = rows.limit[r] = -T(__builtin_inf());
  store(rows.sum + r * kLanes<T>, Vec<T>(T(0)));
}

// Maximum and sum of a row, after its last key.
template <class T>
inline RowState<T> state_of(const SoftmaxRows<T>& rows, int64_t r, const ScoreUnit<T>& unit) {
  return {rows.reference[r] * unit.natural, sum_of(load(rows.sum + r * kLanes<T>))};
}

// The maximum in each lane. Not inlined: gcc would keep the maximum of eight-lane vectors in memory, and the loop would
// wait for it.
template <class T>
SCALEDOT_NOINLINE Vec<T> highest_of(const T* scores, Range seen) {
  Vec<T> even(-T(__builtin_inf())), odd = even;
  int64_t k = seen.begin;
  for (; k + kLanes<T> < seen.end; k += 2 * kLanes<T>) {
    even = maximum(load(scores + k), even);
    odd = maximum(load(scores + k + kLanes<T>), odd);
  }
  return maximum(k < seen.end ? maximum(load(scores + k), even) : even, odd);
}

// Rescales sums of weights from the reference `old` to the reference `now`.
template <class T>
inline void follow_reference(T old, T now, const ScoreUnit<T>& unit, T* sums, int64_t size) {
  if (old == now || old == -T(__builtin_inf())) return;
  const Vec<T> factor = exp2(Vec<T>((old - now) * unit.log2));
  for (int64_t k = 0; k < size; k += kLanes<T>) store(sums + k, load(sums + k) * factor);
}

template <class T>
SCALEDOT_NOINLINE void raise_reference(const SoftmaxRows<T>& rows, int64_t r, T highest, const ScoreUnit<T>& unit,
                                       T* output, int64_t width) {
  follow_reference(rows.reference[r], highest, unit, rows.sum + r * kLanes<T>, kLanes<T>);
  follow_reference(rows.reference[r], highest, unit, output, width);
  rows.reference[r] = highest;
  rows.limit[r] = highest + T(kSlack) / unit.log2;
}

// One row of a score tile.
template <class E>
struct ScoreRow {
  using T = SumOf<E>;
  const ScoreFlags& flags;
  const RowTerms<T>& terms;
  Range keys;
  T* scores;
  E* weights;         // where P goes, as operands
  bool save_weights;  // P also replaces the scores; only for operands that are not the scores themselves
  T* kept;            // where P of the first `saved_keys` keys goes before dropout
  int64_t saved_keys;
};

// Scores to weights P = exp(score - reference), with dropout but without its factor dropout_scale(). Row r of `rows`
// gets the sum of P before dropout. It and `output`, the sum of P V so far, are rescaled if the reference is raised.
template <class E, bool kDropout>
SCALEDOT_INLINE void softmax_row(const ScoreRow<E>& row, const ScoreUnit<SumOf<E>>& unit,
                                 const SoftmaxRows<SumOf<E>>& rows, int64_t r, SumOf<E>* output, int64_t width) {
  using T = SumOf<E>;
  // The reference.
  T* const scores = row.scores;
  const Range seen = seen_vectors(row.terms, row.keys);
  const Vec<T> highest = highest_of(scores, seen);
  if (any_above(highest, rows.limit[r])) raise_reference(rows, r, maximum_of(highest), unit, output, width);

  // The weights and their sum.
  const Vec<T> reference(shift(rows.reference[r])), log2(unit.log2), zero(T(0));
  Vec<T> sum = load(rows.sum + r * kLanes<T>);
  E* const weights = row.weights;
  [[maybe_unused]] const bool save = row.save_weights;
  const auto write = [&](int64_t k, Vec<T> w) {
    OperandTraits<E>::store_along(weights, k, w);
    if constexpr (kHasPairs<E>) {
      if (save) store(scores + k, w);
    }
  };
  T* const kept = row.kept;
  const int64_t saved_keys = row.saved_keys;
  const auto keep = [&](int64_t k, Vec<T> w) {
    if (k < saved_keys) store(kept + k, w);
  };
  for (int64_t k = 0; k < seen.begin; k += kLanes<T>) write(k, zero), keep(k, zero);
  for (int64_t k = seen.begin; k < seen.end; k += kLanes<T>) {
    Vec<T> w = exp2((load(scores + k) - reference) * log2);
    sum = sum + w;
    keep(k, w);
    if constexpr (kDropout) w = select(dropout_mask(row.terms, k), w, w * zero);
    write(k, w);
  }
  for (int64_t k = seen.end; k < padded_depth<E>(count(row.keys)); k += kLanes<T>) {
    write(k, zero), keep(k, zero);
  }
  store(rows.sum + r * kLanes<T>, sum);
}

}  // namespace
}  // namespace scaledot
