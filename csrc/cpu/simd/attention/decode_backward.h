// The backward pass for few query rows over many keys, as in cross-attention with few queries.
//
// Keys and values are read in place, as in decode.h. The rows of a KV group are few, so its S and dP stay in memory.
// Row statistics come from them, not from the forward's lse and output: the rounding errors of S and dP then cancel.
//
//   for each split of kDecodeSplit keys:   S = scores(Q K^T)        dP = keep (dO V^T) / (1 - dropout_p)
//   for each row:                          m = max_j S_j            E = exp(S - m)          l = sum_j E_j
//                                          delta = sum_j E_j dP_j / l - dlse
//   for each split of the keys:            P = E / l                Pd = keep P
//                                          dS = P (dP - delta)      dX = slope dS           (slope: see backward.h)
//     dV = Pd^T dO / (1 - dropout_p)       dK = scale dX^T Q        dQ += scale dX K
//     dMask += dS                          dBias[distance] += dS
// The partial sums of dQ are added in order.
#pragma once

#include "cpu/simd/attention/decode_products.h"
#include "cpu/simd/attention/mask_gradient.h"
#include "cpu/simd/attention/outer_products.h"
#include "cpu/simd/attention/relative_gradient.h"
#include "cpu/simd/attention/row_statistics.h"

namespace scaledot {
namespace {

// Memory of one split of a KV group. `rows`: DecodeRows::whole_rows.
template <class Sum>
struct DecodeSplitGradients {
  Sum* scores;      // (rows, kDecodeSplit): S, then E, then Pd
  Sum* grads;       // the same: dP, then dX
  Sum* slopes;      // the same, or nullptr: all are 1
  Sum* grad_query;  // (rows, head_dim padded): this split's part of dQ
  Sum* maximum;     // (rows)
  Sum* sum;         // the same: of E
  Sum* product;     // the same: of E dP
  bool* finite;     // whether the dot products of a split are
};

// Scratch memory of a worker.
template <class Sum>
struct DecodeBackwardScratch {
  Sum* query;          // (rows, head_dim padded)
  Sum* grad_output;    // (rows, value_dim padded)
  bool finite;         // both are
  Sum* ordered_query;  // in the order of DecodeProducts
  Sum* ordered_grad_output;
  Sum* widened;      // (kGroupKeys, cols padded)
  Sum* sums;         // dX K of neighbouring key tiles
  Sum* line;         // (kOuterKeys, cols padded)
  Sum* grad_scores;  // (kTileKeys): dS of a row
  Sum* diagonals;    // (kTileDiagonals): dS summed along them
  RowTerms<Sum> terms;
};

template <class Sum>
struct DecodeBackwardPlan {
  DecodeRows at_once;
  int64_t splits, classes;
  bool whole_classes;  // a task is a class of KV groups (mask_gradient.h); otherwise it is one of their splits
  DecodeSplitGradients<Sum> first;  // of all splits of as many KV groups as are in memory at once
  char* scratch;                    // of worker 0
  int64_t scratch_bytes;
};

template <class Sum>
DecodeBackwardScratch<Sum> lay_out_decode_scratch(const Problem& p, const DecodeRows& rows, Arena& arena) {
  const int64_t key = rows.whole_rows * padded<Sum>(p.head_dim), value = rows.whole_rows * padded<Sum>(p.value_dim);
  DecodeBackwardScratch<Sum> s = {};
  s.query = take<Sum>(arena, key);
  s.grad_output = take<Sum>(arena, value);
  s.ordered_query = take<Sum>(arena, ordered_size<Sum>(rows, p.head_dim));
  s.ordered_grad_output = take<Sum>(arena, ordered_size<Sum>(rows, p.value_dim));
  s.widened = take<Sum>(arena, widened_size<Sum>(p, rows, max(p.head_dim, p.value_dim)));
  s.sums = take<Sum>(arena, key);
  s.line = take<Sum>(arena, kOuterKeys * padded<Sum>(max(p.head_dim, p.value_dim)));
  s.grad_scores = take<Sum>(arena, kTileKeys);
  s.diagonals = take<Sum>(arena, kTileDiagonals);
  s.terms = lay_out_row<Sum>(p, arena);
  return s;
}

template <class Sum>
DecodeBackwardPlan<Sum> plan_decode_backward(const Problem& p, int workers, Arena& arena) {
  const int64_t rows = p.heads / p.kv_heads * p.query_length, kv_groups = p.batch * p.kv_heads;
  DecodeBackwardPlan<Sum> plan = {};
  plan.at_once = {rows, whole_decode_rows<Sum>(rows), 1};
  plan.splits = max<int64_t>(ceil_div(p.key_length, kDecodeSplit), 1);
  plan.classes = class_count(gradient_classes(p));
  plan.whole_classes = workers == 1 || plan.splits == 1 || plan.classes >= kTasksPerWorker * workers;
  const int64_t splits = plan.splits * (plan.whole_classes ? int64_t(workers) : kv_groups);
  const int64_t scores = splits * plan.at_once.whole_rows * kDecodeSplit, states = splits * plan.at_once.whole_rows;
  plan.first.scores = take<Sum>(arena, scores);
  plan.first.grads = take<Sum>(arena, scores);
  plan.first.slopes = has_slopes(p) ? take<Sum>(arena, scores) : nullptr;
  plan.first.grad_query = take<Sum>(arena, states * padded<Sum>(p.head_dim));
  plan.first.maximum = take<Sum>(arena, states);
  plan.first.sum = take<Sum>(arena, states);
  plan.first.product = take<Sum>(arena, states);
  plan.first.finite = take<bool>(arena, splits);
  plan.scratch = take<char>(arena, 0);
  const int64_t start = arena.used;
  lay_out_decode_scratch<Sum>(p, plan.at_once, arena);
  plan.scratch_bytes = arena.used - start;
  arena.used = start + workers * plan.scratch_bytes;
  return plan;
}

// Takes all memory of the pass.
template <class Sum>
void lay_out_decode_backward(const Problem& p, int workers, Arena& arena) {
  const int64_t splits = plan_decode_backward<Sum>(p, workers, arena).splits;
  MaskGradient<Sum>(p, splits, arena);
  RelativeGradient<Sum>(p, splits, arena);
}

template <class Storage, class Sum>
class DecodeBackward {
 public:
  DecodeBackward(const Problem& p, const DecodeBackwardPlan<Sum>& plan, const MaskGradient<Sum>& mask,
                 const RelativeGradient<Sum>& relative)
      : p_(p),
        plan_(plan),
        mask_(mask),
        relative_(relative),
        unit_(score_unit<Sum>(p)),
        keys_(p, plan.at_once, p.key, p.head_dim),
        values_(p, plan.at_once, p.value, p.value_dim) {}

  // All splits of the KV groups of a class, one KV group after the other in the same memory.
  void add_class(int64_t gradient_class, int worker) const {
    for_each_kv_group(p_, gradient_class, [&](int64_t kv_group) {
      for (int64_t split = 0; split < plan_.splits; ++split) score_split(kv_group, split, worker, worker);
      for (int64_t split = 0; split < plan_.splits; ++split) sum_split(split, worker);
      for (int64_t split = 0; split < plan_.splits; ++split) add_split(kv_group, split, worker, worker);
      store_grad_query(kv_group, worker);
    });
    mask_.end_task();
  }

  // One split of the KV groups of a class, after score_split and sum_split of all their splits.
  void add_split_of_class(int64_t gradient_class, int64_t split, int worker) const {
    for_each_kv_group(p_, gradient_class, [&](int64_t kv_group) { add_split(kv_group, split, kv_group, worker); });
    mask_.end_task();
  }

  // S and dP of a split. `place`: of the KV group in memory.
  void score_split(int64_t kv_group, int64_t split, int64_t place, int worker) const {
    const QueryTile tile = all_rows(p_, kv_group);
    DecodeBackwardScratch<Sum> s = load_rows(tile, worker);
    const DecodeSplitGradients<Sum> part = part_of(place, split);
    const Range all = decode_split(p_, split);
    for (int64_t r = 0; r < plan_.at_once.rows; ++r) part.maximum[r] = -Sum(__builtin_inf());
    *part.finite = true;
    for_each_tile(p_, all, [&](Range keys) { hide(part, keys.begin - all.begin, padded<Sum>(count(keys))); });
    for_each_span(p_, tile, split, [&](Range span) {
      const int64_t at = span.begin - all.begin;
      const DecodeHead<Sum> query = {tile, {s.ordered_query, part.scores + at, nullptr, s.widened, {}}, 0, nullptr};
      const DecodeHead<Sum> grad = {tile, {s.ordered_grad_output, part.grads + at, nullptr, s.widened, {}}, 0, nullptr};
      keys_.dot_products(&query, span);
      if (p_.grad_output.data) values_.dot_products(&grad, span);
      *part.finite &= is_finite(part, at, count(span));
      for_each_tile(p_, span, [&](Range keys) {
        const ScoreFlags flags = score_flags<Sum>(p_, tile, keys);
        for (int64_t r = 0; r < plan_.at_once.rows; ++r)
          finish_row(tile, r, keys, flags, keys.begin - all.begin, part, s.terms);
      });
    });
  }

  // E of a split, its sum, and that of E dP, once all splits are scored.
  void sum_split(int64_t split, int64_t place) const {
    const DecodeSplitGradients<Sum> part = part_of(place, split);
    const int64_t end = round_up(count(decode_split(p_, split)), int64_t(kLanes<Sum>));
    for (int64_t r = 0; r < plan_.at_once.rows; ++r) {
      const Vec<Sum> offset(offset_of(place, r)), zero(Sum(0));
      Vec<Sum> sum = zero, product = zero;
      Sum *const scores = part.scores + r * kDecodeSplit, *const grads = part.grads + r * kDecodeSplit;
      for (int64_t k = 0; k < end; k += kLanes<Sum>) {
        const Vec<Sum> e = exp2(exponent(unit_, load(scores + k), offset));
        store(scores + k, e);
        sum = sum + e;
        product = fma(e, load(grads + k), product);
      }
      part.sum[r] = sum_of(sum);
      part.product[r] = sum_of(product);
    }
  }

  // dK and dV of a split, its part of dQ, and of the gradients that take dS.
  void add_split(int64_t kv_group, int64_t split, int64_t place, int worker) const {
    const QueryTile tile = all_rows(p_, kv_group);
    DecodeBackwardScratch<Sum> s = load_rows(tile, worker);
    const DecodeSplitGradients<Sum> part = part_of(place, split);
    const Range all = decode_split(p_, split);
    const int64_t rows = plan_.at_once.rows, width = padded<Sum>(p_.head_dim);
    bool finite = s.finite && *part.finite;
    RowFactors factors[kDecodeRows];
    for (int64_t r = 0; r < rows; ++r) {
      factors[r] = factors_of(tile, r, place);
      finite &= factors[r].finite;
    }
    clear_row(part.grad_query, plan_.at_once.whole_rows * width);
    int64_t seen = 0;  // keys up to here have their P and dX
    for_each_span(p_, tile, split, [&](Range span) {
      const int64_t at = span.begin - all.begin;
      skip(part, seen, at);
      seen = at + count(span);
      for_each_tile(p_, span, [&](Range keys) {
        const ScoreFlags flags = score_flags<Sum>(p_, tile, keys);
        for (int64_t r = 0; r < rows; ++r)
          p_.dropout_p > 0
              ? row_gradients<true>(tile, r, keys, flags, keys.begin - all.begin, split, factors[r], finite, part, s)
              : row_gradients<false>(tile, r, keys, flags, keys.begin - all.begin, split, factors[r], finite, part, s);
      });
      if (p_.grad_query.data) add_grad_query(tile, span, at, finite, part, s);
    });
    skip(part, seen, count(all));
    store_outer<Storage>(p_, p_.grad_value, tile, all, {part.scores, s.grad_output, rows, p_.value_dim, finite},
                         Sum(dropout_scale(p_)), s.line);
    store_outer<Storage>(p_, p_.grad_key, tile, all, {part.grads, s.query, rows, p_.head_dim, finite}, Sum(p_.scale),
                         s.line);
  }

  void store_grad_query(int64_t kv_group, int64_t place) const {
    if (!p_.grad_query.data) return;
    const QueryTile tile = all_rows(p_, kv_group);
    const int64_t width = padded<Sum>(p_.head_dim);
    for (int64_t r = 0; r < plan_.at_once.rows; ++r) {
      Sum* const sum = part_of(place, 0).grad_query + r * width;
      for (int64_t split = 1; split < plan_.splits; ++split)
        add_row(part_of(place, split).grad_query + r * width, width, sum);
      Storage* to = element_ptr<Storage>(p_, p_.grad_query, tile.batch, head_of(tile, r));
      narrow_row(sum, Sum(p_.scale), p_.head_dim, to + row_of(tile, r) * p_.grad_query.row_stride);
    }
  }

 private:
  // Numbers that turn E and dP of a row into P and dS.
  struct RowFactors {
    Sum inverse_sum, delta;
    bool finite;
  };

  DecodeBackwardScratch<Sum> load_rows(const QueryTile& tile, int worker) const {
    Arena arena = {plan_.scratch + worker * plan_.scratch_bytes, 0};
    DecodeBackwardScratch<Sum> s = lay_out_decode_scratch<Sum>(p_, plan_.at_once, arena);
    s.finite = true;
    const auto load = [&](const TensorView& view, int64_t cols, Sum* rows, Sum* ordered,
                          const DecodeProducts<Storage, Sum>& products) {
      if (view.data)
        s.finite &= load_decode_rows(p_, view, tile, cols, plan_.at_once, rows);
      else
        clear_row(rows, plan_.at_once.whole_rows * padded<Sum>(cols));
      products.order(rows, ordered);
    };
    load(p_.query, p_.head_dim, s.query, s.ordered_query, keys_);
    load(p_.grad_output, p_.value_dim, s.grad_output, s.ordered_grad_output, values_);
    return s;
  }

  DecodeSplitGradients<Sum> part_of(int64_t place, int64_t split) const {
    const int64_t index = place * plan_.splits + split, state = index * plan_.at_once.whole_rows;
    const DecodeSplitGradients<Sum>& first = plan_.first;
    return {first.scores + state * kDecodeSplit,
            first.grads + state * kDecodeSplit,
            first.slopes ? first.slopes + state * kDecodeSplit : nullptr,
            first.grad_query + state * padded<Sum>(p_.head_dim),
            first.maximum + state,
            first.sum + state,
            first.product + state,
            first.finite + index};
  }

  // Keys that no row attends to: S is -inf, dP and slope are 0.
  void hide(const DecodeSplitGradients<Sum>& part, int64_t begin, int64_t size) const {
    for (int64_t r = 0; r < plan_.at_once.rows; ++r) hide_row(part, r * kDecodeSplit + begin, size);
  }
  static void hide_row(const DecodeSplitGradients<Sum>& part, int64_t begin, int64_t size) {
    const Vec<Sum> zero(Sum(0));
    for (int64_t k = begin; k < begin + size; k += kLanes<Sum>) {
      store(part.scores + k, Vec<Sum>(-Sum(__builtin_inf())));
      store(part.grads + k, zero);
      if (part.slopes) store(part.slopes + k, zero);
    }
  }

  bool is_finite(const DecodeSplitGradients<Sum>& part, int64_t begin, int64_t size) const {
    Finite<Sum> finite;
    for (int64_t r = 0; r < plan_.at_once.rows; ++r)
      for (int64_t k = begin; k < begin + size; k += kLanes<Sum>) {
        finite.add(load(part.scores + r * kDecodeSplit + k));
        finite.add(load(part.grads + r * kDecodeSplit + k));
      }
    return finite.all();
  }

  // Dot products of row r to S and dP. `at`: the tile's first key in the split.
  void finish_row(const QueryTile& tile, int64_t r, Range keys, const ScoreFlags& flags, int64_t at,
                  const DecodeSplitGradients<Sum>& part, RowTerms<Sum>& terms) const {
    const int64_t line = r * kDecodeSplit + at;
    Sum *const scores = part.scores + line, *const grads = part.grads + line;
    load_terms(p_, tile, r, keys, flags, kNextKeys, terms, r > 0);
    finish_scores_outlined(p_, flags, terms, keys, scores, part.slopes ? part.slopes + line : nullptr);
    const Range seen = seen_vectors(terms, keys);
    hide_row(part, line, seen.begin);
    hide_row(part, line + seen.end, round_up(count(keys), int64_t(kLanes<Sum>)) - seen.end);
    const Vec<Sum> zero(Sum(0)), masked(-Sum(__builtin_inf())), dropout_factor(Sum(dropout_scale(p_)));
    Vec<Sum> highest = masked;
    for (int64_t k = seen.begin; k < seen.end; k += kLanes<Sum>) {
      const Vec<Sum> score = load(scores + k);
      Vec<Sum> dp = load(grads + k);
      if (p_.dropout_p > 0) dp = select(dropout_mask(terms, k), dp * dropout_factor, zero);
      store(grads + k, select(score == masked, zero, dp));  // 0 * NaN is NaN
      highest = maximum(score, highest);
    }
    part.maximum[r] = max(part.maximum[r], maximum_of(highest));
  }

  // The maximum of row r over all splits, as a natural logarithm.
  Sum offset_of(int64_t place, int64_t r) const {
    Sum maximum = part_of(place, 0).maximum[r];
    for (int64_t split = 1; split < plan_.splits; ++split) maximum = max(maximum, part_of(place, split).maximum[r]);
    return shift(maximum * unit_.natural);
  }

  RowFactors factors_of(const QueryTile& tile, int64_t r, int64_t place) const {
    Sum sum = Sum(0), product = Sum(0);
    for (int64_t split = 0; split < plan_.splits; ++split) {
      sum += part_of(place, split).sum[r];
      product += part_of(place, split).product[r];
    }
    const Sum* grad_lse = element_ptr<const Sum>(p_, p_.grad_lse, tile.batch, head_of(tile, r));
    const Sum inverse = normaliser(RowState<Sum>{Sum(0), sum});
    const Sum delta = product * inverse - (grad_lse ? grad_lse[row_of(tile, r) * p_.grad_lse.row_stride] : Sum(0));
    const Sum offset = offset_of(place, r);
    return {inverse, delta, (inverse - inverse) + (delta - delta) + (offset - offset) == Sum(0)};
  }

  // Keys of excluded tiles add nothing.
  void skip(const DecodeSplitGradients<Sum>& part, int64_t begin, int64_t end) const {
    for (int64_t r = 0; r < plan_.at_once.rows; ++r)
      for (int64_t k = begin; k < end; ++k)
        part.scores[r * kDecodeSplit + k] = part.grads[r * kDecodeSplit + k] = kSkip<Sum>;
  }

  // E and dP of row r to Pd and dX, and dS to the gradients that take it. If something is not finite, Pd and dX of
  // masked keys are kSkip.
  template <bool kDropout>
  SCALEDOT_NOINLINE void row_gradients(const QueryTile& tile, int64_t r, Range keys, const ScoreFlags& flags,
                                       int64_t at, int64_t split, const RowFactors& factors, bool finite,
                                       const DecodeSplitGradients<Sum>& part, DecodeBackwardScratch<Sum>& s) const {
    const int64_t line = r * kDecodeSplit + at;
    Sum *const scores = part.scores + line, *const grads = part.grads + line;
    const Sum* const slopes = part.slopes ? part.slopes + line : nullptr;
    if (kDropout || flags.replaced || !finite) load_terms(p_, tile, r, keys, flags, kNextKeys, s.terms);
    const Vec<Sum> inverse_sum(factors.inverse_sum), minus_delta(-factors.delta), zero(Sum(0));
    for (int64_t k = 0; k < round_up(count(keys), int64_t(kLanes<Sum>)); k += kLanes<Sum>) {
      const Vec<Sum> p = load(scores + k) * inverse_sum;
      Vec<Sum> grad = p * (load(grads + k) + minus_delta);
      // A replaced score depends on neither the product nor what is added to it.
      if (flags.replaced) grad = select(bytes_equal<Sum>(s.terms.state + k, kReplaced), zero, grad);
      store(s.grad_scores + k, grad);
      store(grads + k, slopes ? grad * load(slopes + k) : grad);
      store(scores + k, kDropout ? select(dropout_mask(s.terms, k), p, p * zero) : p);  // NaN stays NaN
    }
    if (!finite) mark_masked_row(keys, flags, scores, grads, s);
    if (mask_.wanted()) mask_.add(tile.batch, head_of(tile, r), row_of(tile, r), keys, split, s.grad_scores);
    if (relative_.wanted()) relative_.add(tile, r, keys, split, s.grad_scores, s.diagonals);
  }

  SCALEDOT_RARE void mark_masked_row(Range keys, const ScoreFlags& flags, Sum* weights, Sum* grads,
                                     const DecodeBackwardScratch<Sum>& s) const {
    mark_masked(flags, s.terms, keys, weights, 1);
    mark_masked(flags, s.terms, keys, grads, 1, OnReplaced::mark);
    clear_masked(flags, s.terms, keys, s.grad_scores);
  }

  // dQ += dX K for neighbouring key tiles.
  void add_grad_query(const QueryTile& tile, Range span, int64_t at, bool finite, const DecodeSplitGradients<Sum>& part,
                      const DecodeBackwardScratch<Sum>& s) const {
    const DecodeHead<Sum> head = {tile, {nullptr, part.grads + at, s.sums, nullptr, {}}, 0, nullptr};
    finite ? keys_.sum_values(&head, span) : keys_.sum_live_values(head, span);
    add_row(s.sums, plan_.at_once.rows * padded<Sum>(p_.head_dim), part.grad_query);
  }

  const Problem& p_;
  const DecodeBackwardPlan<Sum>& plan_;
  const MaskGradient<Sum>& mask_;
  const RelativeGradient<Sum>& relative_;
  const ScoreUnit<Sum> unit_;
  const DecodeProducts<Storage, Sum> keys_, values_;
};

template <class Storage>
void decode_backward_pass(const Problem& p, const Executor& executor) {
  using Sum = typename Compute<Storage>::type;
  Arena arena = {static_cast<char*>(executor.workspace), 0};
  const DecodeBackwardPlan<Sum> plan = plan_decode_backward<Sum>(p, executor.workers, arena);
  const MaskGradient<Sum> mask(p, plan.splits, arena);
  const RelativeGradient<Sum> relative(p, plan.splits, arena);
  const DecodeBackward<Storage, Sum> pass(p, plan, mask, relative);
  const int64_t kv_groups = p.batch * p.kv_heads;
  if (mask.wanted()) mask.clear(executor);
  if (relative.wanted()) relative.clear(executor);
  if (plan.whole_classes) {
    parallel(executor, plan.classes, [&](int64_t task, int worker) { pass.add_class(task, worker); });
  } else {
    parallel(executor, kv_groups * plan.splits, [&](int64_t task, int worker) {
      pass.score_split(task / plan.splits, task % plan.splits, task / plan.splits, worker);
    });
    parallel(executor, kv_groups * plan.splits,
             [&](int64_t task, int) { pass.sum_split(task % plan.splits, task / plan.splits); });
    parallel(executor, plan.classes * plan.splits, [&](int64_t task, int worker) {
      pass.add_split_of_class(task / plan.splits, task % plan.splits, worker);
    });
    parallel(executor, kv_groups, [&](int64_t task, int) { pass.store_grad_query(task, task); });
  }
  if (mask.wanted()) mask.finish(executor);
  if (relative.wanted()) relative.finish(executor);
}

// Why the backward of a call with few rows takes another kernel, or nullptr.
inline const char* why_no_decode_backward(const Problem& p) {
  if (is_quantised(p)) return "quantised keys and values have no backward";
  if (p.part.given) return "the call is part of a larger attention, whose other keys are elsewhere";
  if (p.grad_weights.data) return "return_weights is set";
  return nullptr;
}

}  // namespace
}  // namespace scaledot
