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
    const auto add = [&](int64_t index, double x) {
      if (index >= 0 && index < program.number_count) sums[index] += x;
    };
    for (int32_t n = 0; n < program.gradient_count; ++n) {
      const auto [index, factor] = program.gradients[n];
      const Range span = {0, round_up(keys, int64_t(kLanes<Sum>))};
      const Sum* const factors = registers.template operand<Sum>(factor, ScoreSpace::score, span, 0);
      const int64_t* const at = is_by_row(index.space)
                                    ? registers.template at<int64_t>(index)
                                    : registers.template operand<int64_t>(index, ScoreSpace::score, span, 1);
      // A factor may be infinite where dS is 0.
      const auto term = [&](int64_t k) {
        return grad_scores[k] == Sum(0) ? 0.0 : double(grad_scores[k]) * double(factors[k]);
      };
      if (index.space == ScoreSpace::constant || is_by_row(index.space)) {
        double sum = 0;
        for (int64_t k = 0; k < keys; ++k) sum += term(k);
        add(at[is_by_row(index.space) ? registers.row : 0], sum);
      } else {
        for (int64_t k = 0; k < keys; ++k)
          if (grad_scores[k] != Sum(0)) add(at[k], term(k));
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

  const Problem& p_;
  const bool wanted_;
  int64_t splits_ = 1, count_ = 0, copies_ = 0;
  double* sums_ = nullptr;  // (copy, count)
};

}  // namespace
}  // namespace scaledot
