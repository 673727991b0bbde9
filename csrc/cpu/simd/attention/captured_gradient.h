// The gradients of the numbers that a score function loads (core/score_program.h):
//
//   dNumber[n] = sum of dS[i, j] f[i, j] over the loads of n, where f = d score / d number
//
// Sums are in double, in a fixed order. A task adds to sums of its own, as far as kSplitBudget allows, or to sums that
// no other task of the moment adds to: heads that load different numbers share them, and otherwise one task visits all
// KV groups in order. At the end the sums are added up in order.
#pragma once

#include "cpu/simd/attention/score_program.h"

namespace scaledot {
namespace {

inline bool wants_captured_gradient(const Problem& p) { return p.score_program && p.score_program->grad_numbers; }

// Bytes of the sums of one task, whole cache lines.
inline int64_t captured_sums_bytes(const Problem& p) {
  return round_up(p.score_program->number_count * int64_t(sizeof(double)), kCacheLine);
}

// Whether each KV group has sums of its own.
inline bool has_own_captured_sums(const Problem& p) {
  return p.score_program->captured_by == CapturedBy::any &&
         captured_sums_bytes(p) <= kSplitBudget / max<int64_t>(p.batch * p.kv_heads, 1);
}

// At most this many tasks may share a KV group.
inline int64_t most_captured_splits(const Problem& p) {
  if (!wants_captured_gradient(p)) return kUnbounded;
  const bool any = p.score_program->captured_by == CapturedBy::any;
  if (any && !has_own_captured_sums(p)) return 1;
  const int64_t bytes = captured_sums_bytes(p) * (any ? p.batch * p.kv_heads : 1);
  return max<int64_t>(kSplitBudget / max<int64_t>(bytes, 1), 1);
}

template <class Sum>
class CapturedGradients {
 public:
  // `splits`: how many tasks of the backward share a KV group.
  CapturedGradients(const Problem& p, int64_t splits, Arena& arena) : p_(p), wanted_(wants_captured_gradient(p)) {
    if (!wanted_) return;
    splits_ = splits;
    count_ = captured_sums_bytes(p) / int64_t(sizeof(double));
    copies_ = splits * (has_own_captured_sums(p) ? p.batch * p.kv_heads : 1);
    sums_ = take<double>(arena, copies_ * count_);
  }

  bool wanted() const { return wanted_; }

  void clear(const Executor& executor) const {
    parallel(executor, copies_, [&](int64_t copy, int) { clear_row(sums_ + copy * count_, count_); });
  }

  // Adds the gradients of row r of a tile. `grad_scores`: dS; `registers`: of a backward program that was run on the
  // row; `split`: the number of the caller among the tasks that share the KV group.
  SCALEDOT_NOINLINE void add(const QueryTile& tile, int64_t keys, int64_t split, const Sum* grad_scores,
                             const ScoreRegisters<Sum>& registers) const {
    const ScoreProgram& program = *p_.score_program;
    const int64_t own = has_own_captured_sums(p_) ? (tile.batch * p_.kv_heads + tile.kv_head) * splits_ : 0;
    double* const sums = sums_ + (own + split) * count_;
    for (int32_t n = 0; n < program.gradient_count; ++n) {
      const auto [index, factor] = program.gradients[n];
      const Range span = {0, round_up(keys, int64_t(kLanes<Sum>))};
      const Sum* const factors = registers.template operand<Sum>(factor, ScoreSpace::score, span, 0);
      if (is_by_row(index.space)) {
        add_all(sums, registers.template at<int64_t>(index)[registers.row], keys, grad_scores, factors);
      } else {
        const int64_t* const at = registers.template operand<int64_t>(index, ScoreSpace::score, span, 1);
        if (index.space == ScoreSpace::constant)
          add_all(sums, at[0], keys, grad_scores, factors);
        else
          add_each(sums, at, keys, grad_scores, factors);
      }
    }
  }

  // Writes the sums of all tasks.
  void finish(const Executor& executor) const {
    const int64_t numbers = p_.score_program->number_count;
    Sum* const to = static_cast<Sum*>(p_.score_program->grad_numbers);
    parallel(executor, ceil_div(numbers, kNumbersOfTask), [&](int64_t task, int) {
      for (int64_t n = task * kNumbersOfTask; n < min(numbers, (task + 1) * kNumbersOfTask); ++n) {
        double sum = 0;
        for (int64_t copy = 0; copy < copies_; ++copy) sum += sums_[copy * count_ + n];
        to[n] = Sum(sum);
      }
    });
  }

 private:
  static constexpr int64_t kNumbersOfTask = 1024;
  static constexpr int64_t kBlock = kLanes<double>;  // keys whose terms are one vector
  using Words = Native<uint64_t>;

  static Native<double> as_double(const Sum* from) {
    if constexpr (sizeof(Sum) == sizeof(double))
      return load(from).v;
    else
      return __builtin_convertvector(Loose<Sum, kBlock>(*reinterpret_cast<const Loose<Sum, kBlock>*>(from)),
                                     Native<double>);
  }

  // dS f of a block of keys. A factor may be infinite where dS is 0.
  SCALEDOT_INLINE static Vec<double> terms(const Sum* grad_scores, const Sum* factors) {
    const Native<double> grads = as_double(grad_scores), products = grads * as_double(factors);
    return Native<double>(Words(products) & Words(grads != 0.0));
  }
  static double term(Sum grad_score, Sum factor) {
    return grad_score == Sum(0) ? 0.0 : double(grad_score) * double(factor);
  }

  // All keys load the number `at`.
  void add_all(double* sums, int64_t at, int64_t keys, const Sum* grad_scores, const Sum* factors) const {
    if (at < 0 || at >= p_.score_program->number_count) return;
    Vec<double> even(0.0), odd(0.0);
    int64_t k = 0;
    for (; k + 2 * kBlock <= keys; k += 2 * kBlock) {
      even = even + terms(grad_scores + k, factors + k);
      odd = odd + terms(grad_scores + k + kBlock, factors + k + kBlock);
    }
    double sum = sum_of(even + odd);
    for (; k < keys; ++k) sum += term(grad_scores[k], factors[k]);
    sums[at] += sum;
  }

  // Whether the keys of a block load numbers with this distance from key to key.
  SCALEDOT_INLINE static bool is_run(const int64_t* at, int64_t step) {
    const Words steps = Words(lane_numbers<int64_t>().v) * uint64_t(step), from = steps + uint64_t(at[0]);
    const Words differ = Words(Words(load(at).v) != from);
    return !any_above(Vec<double>(Native<double>(differ & Words(Vec<double>(1.0).v))), 0.5);
  }

  // Key k loads the number at[k]. In tables of distances, the keys of a block load one number, or neighbours in order.
  // Sums of one number would wait for each other, so its terms are added up first. Neighbours are vectors.
  void add_each(double* sums, const int64_t* at, int64_t keys, const Sum* grad_scores, const Sum* factors) const {
    const int64_t count = p_.score_program->number_count;
    const auto add = [&](int64_t k, double x) {
      if (at[k] >= 0 && at[k] < count) sums[at[k]] += x;
    };
    int64_t k = 0;
    for (; k + kBlock <= keys; k += kBlock) {
      const Vec<double> x = terms(grad_scores + k, factors + k);
      const int64_t first = at[k], last = at[k + kBlock - 1], step = first == last ? 0 : first < last ? 1 : -1;
      if (min(first, last) >= 0 && max(first, last) < count && is_run(at + k, step)) {
        double* const to = sums + min(first, last);
        if (step == 0)
          *to += sum_of(x);
        else
          store(to, load(to) + (step > 0 ? x : reversed(x)));
      } else {
        for (int64_t l = 0; l < kBlock; ++l) add(k + l, x.v[l]);
      }
    }
    for (; k < keys; ++k) add(k, term(grad_scores[k], factors[k]));
  }
  SCALEDOT_INLINE static Vec<double> reversed(Vec<double> x) {
    return shuffle(x.v, x.v, uint64_t(kBlock - 1) - Words(lane_numbers<int64_t>().v));
  }

  const Problem& p_;
  const bool wanted_;
  int64_t splits_ = 1, count_ = 0, copies_ = 0;
  double* sums_ = nullptr;  // (copy, count)
};

}  // namespace
}  // namespace scaledot
