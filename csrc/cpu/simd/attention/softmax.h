// The online softmax of a tile's rows (core/softmax.h), in the unit of their scores.
//
//   m' = max(m, max_j S_j)      P_j = exp(S_j - m')      l = l exp(m - m') + sum_j P_j      O = O exp(m - m')
// m' is a row's lazy maximum. It follows the maximum lazily: it is raised only if a score exceeds it by more than
// kSlack, so that l and O are seldom rescaled.
#pragma once

#include "cpu/simd/attention/scores.h"

namespace scaledot {
namespace {

constexpr double kSlack = 8;  // in powers of two: weights stay below 2^8

template <class Sum>
struct SoftmaxRows {
  Sum* lazy_max;  // -inf: no key so far
  Sum* limit;     // a score above this raises the lazy maximum
  Sum* sum;       // l, kLanes partial sums a row
};

template <class Sum>
SoftmaxRows<Sum> lay_out_softmax(Arena& arena, int64_t rows) {
  return {take<Sum>(arena, rows), take<Sum>(arena, rows), take<Sum>(arena, rows * kLanes<Sum>)};
}

template <class Sum>
inline SoftmaxRows<Sum> from_row(const SoftmaxRows<Sum>& rows, int64_t r) {
  return {rows.lazy_max + r, rows.limit + r, rows.sum + r * kLanes<Sum>};
}

template <class Sum>
inline void reset(const SoftmaxRows<Sum>& rows, int64_t r) {
  rows.lazy_max[r] = rows.limit[r] = -Sum(__builtin_inf());
  store(rows.sum + r * kLanes<Sum>, Vec<Sum>(Sum(0)));
}

// Maximum and sum of a row, after its last key.
template <class Sum>
inline RowState<Sum> state_of(const SoftmaxRows<Sum>& rows, int64_t r, const ScoreUnit<Sum>& unit) {
  return {rows.lazy_max[r] * unit.natural, sum_of(load(rows.sum + r * kLanes<Sum>))};
}

// The maximum in each lane. Not inlined: gcc would hold the maximum of eight-lane vectors in memory, and the loop would
// wait for it.
template <class Sum>
SCALEDOT_NOINLINE Vec<Sum> highest_of(const Sum* scores, Range seen) {
  Vec<Sum> even(-Sum(__builtin_inf())), odd = even;
  int64_t k = seen.begin;
  for (; k + kLanes<Sum> < seen.end; k += 2 * kLanes<Sum>) {
    even = maximum(load(scores + k), even);
    odd = maximum(load(scores + k + kLanes<Sum>), odd);
  }
  return maximum(k < seen.end ? maximum(load(scores + k), even) : even, odd);
}

// Rescales sums of weights from the lazy maximum `old` to the lazy maximum `now`.
template <class Sum>
inline void follow_lazy_max(Sum old, Sum now, const ScoreUnit<Sum>& unit, Sum* sums, int64_t size) {
  if (old == now || old == -Sum(__builtin_inf())) return;
  const Vec<Sum> factor = exp2(Vec<Sum>((old - now) * unit.log2));
  for (int64_t k = 0; k < size; k += kLanes<Sum>) store(sums + k, load(sums + k) * factor);
}

template <class Sum>
SCALEDOT_NOINLINE void raise_lazy_max(const SoftmaxRows<Sum>& rows, int64_t r, Sum highest, const ScoreUnit<Sum>& unit,
                                      Sum* output, int64_t width) {
  follow_lazy_max(rows.lazy_max[r], highest, unit, rows.sum + r * kLanes<Sum>, kLanes<Sum>);
  follow_lazy_max(rows.lazy_max[r], highest, unit, output, width);
  rows.lazy_max[r] = highest;
  rows.limit[r] = highest + Sum(kSlack) / unit.log2;
}

// One row of a score tile.
template <class Operand>
struct ScoreRow {
  using Sum = SumOf<Operand>;
  const ScoreFlags& flags;
  const RowTerms<Sum>& terms;
  Range keys;
  Sum* scores;
  Operand* weights;   // where P goes, as operands
  bool save_weights;  // P also replaces the scores; only for operands that are not the scores themselves
  Sum* saved_row;     // where P of the first `saved_keys` keys goes before dropout
  int64_t saved_keys;
};

// Scores to weights P = exp(score - lazy_max), with dropout but without its factor dropout_scale(). Row r of `rows`
// gets the sum of P before dropout. It and `output`, the sum of P V so far, are rescaled if the lazy maximum is raised.
template <class Operand, bool kDropout>
SCALEDOT_INLINE void softmax_row(const ScoreRow<Operand>& row, const ScoreUnit<SumOf<Operand>>& unit,
                                 const SoftmaxRows<SumOf<Operand>>& rows, int64_t r, SumOf<Operand>* output,
                                 int64_t width) {
  using Sum = SumOf<Operand>;
  // The lazy maximum.
  Sum* const scores = row.scores;
  const Range seen = seen_vectors(row.terms, row.keys);
  const Vec<Sum> highest = highest_of(scores, seen);
  if (any_above(highest, rows.limit[r])) raise_lazy_max(rows, r, maximum_of(highest), unit, output, width);

  // The weights and their sum.
  const Vec<Sum> lazy_max(shift(rows.lazy_max[r])), log2(unit.log2), zero(Sum(0));
  Vec<Sum> sum = load(rows.sum + r * kLanes<Sum>);
  Operand* const weights = row.weights;
  [[maybe_unused]] const bool save = row.save_weights;
  const auto write = [&](int64_t k, Vec<Sum> w) {
    OperandTraits<Operand>::store_along(weights, k, w);
    if constexpr (kHasBf16Pairs<Operand>) {
      if (save) store(scores + k, w);
    }
  };
  Sum* const saved_row = row.saved_row;
  const int64_t saved_keys = row.saved_keys;
  const auto save_key = [&](int64_t k, Vec<Sum> w) {
    if (k < saved_keys) store(saved_row + k, w);
  };
  for (int64_t k = 0; k < seen.begin; k += kLanes<Sum>) write(k, zero), save_key(k, zero);
  for (int64_t k = seen.begin; k < seen.end; k += kLanes<Sum>) {
    Vec<Sum> w = exp2((load(scores + k) - lazy_max) * log2);
    sum = sum + w;
    save_key(k, w);
    if constexpr (kDropout) w = select(dropout_mask(row.terms, k), w, w * zero);
    write(k, w);
  }
  for (int64_t k = seen.end; k < padded_depth<Operand>(count(row.keys)); k += kLanes<Sum>) {
    write(k, zero), save_key(k, zero);
  }
  store(rows.sum + r * kLanes<Sum>, sum);
}

}  // namespace
}  // namespace scaledot
