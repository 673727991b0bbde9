// The gradients of a tile of scores, a group of rows at a time.
//
//   P  = exp(S - lse), or saved  Pd = keep P            dP = keep (dO V^T + dW) / (1 - dropout_p)
//   dS = P (dP - delta)         dX = slope dS
// A group is the kElements rows whose elements make one row of operands: 1, or 2 where operands are Bf16Pairs.
#pragma once

#include "cpu/simd/attention/row_statistics.h"
#include "cpu/simd/attention/shared_key.h"

namespace scaledot {
namespace {

template <class Operand>
class ScoreGradients {
  using Sum = SumOf<Operand>;
  static constexpr int kGroup = kElements<Operand>;

 public:
  ScoreGradients(const Problem& p, const MaskGradient<Sum>& mask, const RelativeGradient<Sum>& relative,
                 const CapturedGradients<Sum>& captured)
      : p_(p),
        mask_(mask),
        relative_(relative),
        captured_(captured),
        takes_scores_(mask.wanted() || relative.wanted() || captured.wanted()),
        unit_(score_unit<Sum>(p)) {}

  // Computes S and dP, then Pd and dX into the scratch memory, and passes dS on to the gradients of attn_mask,
  // relative_bias and captured numbers. `first`: the first key, counted from the key tile's. `task`: see
  // MaskGradient::add.
  void compute(const QueryTile& tile, Range keys, int64_t first, int64_t task, Ahead ahead,
               const BackwardScratch<Operand>& s) const {
    const int64_t rows = tile_rows(tile);
    const ScoreFlags flags = score_flags<Sum>(p_, tile, keys);
    prefetch_rows(p_, p_.grad_weights, tile, keys);  // arrives during the products
    if (!saves_tile(p_, keys))
      multiply_tile(tile, keys, p_.head_dim, s.query, s.key_columns.from_column(first), s.scores);
    if (p_.grad_output.data)
      multiply_tile(tile, keys, p_.value_dim, s.grad_output, s.value_columns.from_column(first), s.grads);
    else
      clear_row(s.grads, rows * kRowStride<Sum>);
    const bool general = has_slopes(flags) || p_.grad_weights.data || (takes_scores_ && !scores_are_operands(s)) ||
                         (kHasBf16Pairs<Operand> && !score_gradients_are_complete(p_));
    if (general)
      p_.dropout_p > 0 ? tile_gradients<true, true>(tile, keys, flags, task, ahead, s)
                       : tile_gradients<true, false>(tile, keys, flags, task, ahead, s);
    else
      p_.dropout_p > 0 ? tile_gradients<false, true>(tile, keys, flags, task, ahead, s)
                       : tile_gradients<false, false>(tile, keys, flags, task, ahead, s);
  }

 private:
  // Rows r, ..., r + count - 1 of a tile.
  struct RowGroup {
    const QueryTile& tile;
    Range keys;
    const ScoreFlags& flags;
    int64_t r;
    int count;
    int64_t task;
    Ahead ahead;
    bool saved;  // P comes from the forward
  };

  // Values that the gradients of a row need in addition to its scores.
  struct GroupValues {
    Range seen[kGroup] = {};
    unsigned finite = 0;             // bit g: everything that the gradients of row g are made of is finite
    const Sum* scores[kGroup] = {};  // or P, if it is saved
    Vec<Sum> offset[kGroup] = {}, inverse_sum[kGroup] = {}, minus_delta[kGroup] = {};
    RowSums<Sum> sums[kGroup];
  };

  // Whether d score / d (scale * dot product) can differ from 1.
  static bool has_slopes(const ScoreFlags& flags) { return flags.softcap || flags.program || flags.replaced; }

  // Whether s.grad_rows holds dS itself, if there are no slopes: operands are single elements and none is marked.
  static bool scores_are_operands(const BackwardScratch<Operand>& s) { return !kHasBf16Pairs<Operand> && s.finite; }

  // kGeneral: there are slopes or dW, or dS needs its own memory.
  template <bool kGeneral, bool kDropout>
  SCALEDOT_NOINLINE void tile_gradients(const QueryTile& tile, Range keys, const ScoreFlags& flags, int64_t task,
                                        Ahead ahead, const BackwardScratch<Operand>& s) const {
    GroupTerms<Operand> terms = s.group;
    const bool saved = saves_tile(p_, keys);
    for (int64_t r = 0, rows = tile_rows(tile); r < rows; r += kGroup)
      group_gradients<kGeneral, kDropout>(
          {tile, keys, flags, r, int(min<int64_t>(kGroup, rows - r)), task, ahead, saved}, terms, s);
    for (int64_t line = ceil_div(tile_rows(tile), int64_t(kGroup)); line < depth_of<Operand>(tile_rows(tile)); ++line) {
      clear_row(s.weights + line * kColumnStride<Operand>, padded<Sum>(count(keys)));
      clear_row(s.grad_columns + line * kColumnStride<Operand>, padded<Sum>(count(keys)));
    }
  }

  template <bool kGeneral, bool kDropout>
  SCALEDOT_INLINE void group_gradients(const RowGroup& group, GroupTerms<Operand>& terms,
                                       const BackwardScratch<Operand>& s) const {
    GroupValues values;
    load_group<kGeneral>(group, terms, s, values);
    for (int g = 0; g < group.count; ++g)
      if (s.whole[group.r + g]) normalise_whole_row<kGeneral, kDropout>(group, g, terms, s, values);

    const Vec<Sum> zero(Sum(0)), dropout_factor(Sum(dropout_scale(p_)));
    const int64_t r = group.r, line = r / kGroup * kColumnStride<Operand>;
    int64_t k = 0;
    for (; k < padded_depth<Operand>(count(group.keys)); k += kLanes<Sum>) {
      Vec<Sum> weights[kGroup], grads[kGroup];
#pragma GCC unroll 2
      for (int g = 0; g < kGroup; ++g) {
        weights[g] = grads[g] = zero;
        if (k < values.seen[g].begin || k >= values.seen[g].end) {
          if (kGeneral && takes_scores_) store(terms.grad_scores + g * kTileKeys + k, zero);
          continue;
        }
        vector_gradients<kGeneral, kDropout>(group, g, k, dropout_factor, terms, s, values, weights[g], grads[g]);
      }
      OperandTraits<Operand>::store_across(s.weights + line + k, weights);
      OperandTraits<Operand>::store_across(s.grad_columns + line + k, grads);
      if constexpr (kGroup > 1)
        for (int g = 0; g < group.count; ++g) {
          OperandTraits<Operand>::store_along(s.grad_rows + (r + g) * kRowStride<Operand>, k, grads[g]);
        }
    }
    if constexpr (kGroup > 1)
      for (int g = 0; g < group.count; ++g) {
        if (kGeneral) s.row_sums[r + g] = values.sums[g];
        // shared_key.h reads whole vectors of operands.
        OperandTraits<Operand>::store_along(s.grad_rows + (r + g) * kRowStride<Operand>, k, zero);
      }
    for (int g = 0; g < group.count; ++g) finish_row<kGeneral>(group, g, values.finite >> g & 1, terms, s);
  }

  // Mask terms, scores and row statistics of the group.
  template <bool kGeneral>
  SCALEDOT_INLINE void load_group(const RowGroup& group, GroupTerms<Operand>& terms, const BackwardScratch<Operand>& s,
                                  GroupValues& values) const {
    Finite<Sum> unused;
    const auto& [tile, keys, flags, r, here, task, ahead, saved] = group;
    for (int g = 0; g < here; ++g) {
      RowTerms<Sum>& row = terms.row[g];
      Sum* const scores = s.scores + (r + g) * kRowStride<Sum>;
      values.scores[g] = scores;
      if (saved) {
        values.scores[g] = saved_row(group, g, row, s);
      } else {
        load_terms(p_, tile, r + g, keys, flags, ahead, row, r > 0);
        finish_scores_outlined(p_, flags, row, keys, scores,
                               kGeneral && has_slopes(flags) ? terms.slopes + g * kTileKeys : nullptr);
      }
      values.seen[g] = seen_vectors(row, keys);
      const auto [offset, inverse_sum] = s.softmax[r + g];
      const Sum delta = s.delta[r + g];
      // An infinite bias makes lse NaN, and lse the weights of masked keys, which have to be marked.
      const bool finite = (offset - offset) + (inverse_sum - inverse_sum) + (delta - delta) == Sum(0);
      values.finite |= unsigned(s.finite && finite) << g;
      values.offset[g] = Vec<Sum>(offset);
      values.inverse_sum[g] = Vec<Sum>(inverse_sum);
      values.minus_delta[g] = Vec<Sum>(-delta);
      if (kGeneral && p_.grad_weights.data)
        with_storage_of<Operand>(p_.dtype, [&, &tile = tile, &keys = keys, r = r + g]<class Storage>(Type<Storage>) {
          const RowBlock<Storage> grad =
              block<Storage>(p_, p_.grad_weights, tile.batch, head_of(tile, r), row_of(tile, r));
          load_row(grad.data + keys.begin * grad.col_stride, grad.col_stride, count(keys),
                   terms.grad_weights + g * kTileKeys, unused);
        });
    }
  }

  // P of row g of the group. It is 0 at masked keys, so masks are read only where zeros do not say enough.
  SCALEDOT_INLINE const Sum* saved_row(const RowGroup& group, int g, RowTerms<Sum>& row,
                                       const BackwardScratch<Operand>& s) const {
    const QueryTile& tile = group.tile;
    const int64_t r = group.r + g, first = group.keys.begin;
    prefetch_row(p_, p_.saved_softmax, tile, r, group.keys, group.ahead);
    const Sum* const saved = element_ptr<const Sum>(p_, p_.saved_softmax, tile.batch, head_of(tile, r)) +
                             row_of(tile, r) * p_.saved_softmax.row_stride;
    if (!s.finite || group.flags.replaced) {
      load_terms(p_, tile, r, group.keys, group.flags, group.ahead, row);
      if (!s.finite) return live_saved_row(group, g, saved + first, row, s);
    }
    // Only these keys of the row have a weight: the forward's tile may have had fewer rows, and fewer keys.
    load_position_terms(p_, tile, r, group.keys, row, group.r > 0);
    return saved + first;
  }

  // Clears P and dP at masked keys, where positions leave P undefined and NaN may be in dP. Returns P.
  SCALEDOT_RARE const Sum* live_saved_row(const RowGroup& group, int g, const Sum* saved, const RowTerms<Sum>& row,
                                          const BackwardScratch<Operand>& s) const {
    const int64_t line = (group.r + g) * kRowStride<Sum>, end = round_up(count(group.keys), int64_t(kLanes<Sum>));
    for (int64_t k = 0; k < end; ++k) {
      const bool masked = is_masked(group.flags, row, group.keys, k);
      s.scores[line + k] = masked ? Sum(0) : saved[k];
      if (masked) s.grads[line + k] = Sum(0);
    }
    return s.scores + line;
  }

  // A row whose keys are all in this tile: 1 / sum and delta come from the row itself. Replaces its scores by
  // exp(s - offset) and its grads by dP.
  template <bool kGeneral, bool kDropout>
  SCALEDOT_INLINE void normalise_whole_row(const RowGroup& group, int g, const GroupTerms<Operand>& terms,
                                           const BackwardScratch<Operand>& s, GroupValues& values) const {
    const int64_t line = (group.r + g) * kRowStride<Sum>;
    const WholeRow whole = whole_row<kGeneral, kDropout>(terms, g, values.seen[g], values.offset[g],
                                                         group.saved ? values.scores[g] : nullptr, s.scores + line,
                                                         s.grads + line, s.delta[group.r + g]);
    const bool finite = (whole.inverse_sum - whole.inverse_sum) + (whole.delta - whole.delta) == Sum(0);
    values.finite &= ~(unsigned(!finite) << g);
    values.inverse_sum[g] = Vec<Sum>(whole.inverse_sum);
    values.minus_delta[g] = Vec<Sum>(-whole.delta);
  }

  struct WholeRow {
    Sum inverse_sum, delta;
  };
  template <bool kGeneral, bool kDropout>
  WholeRow whole_row(const GroupTerms<Operand>& terms, int g, Range seen, Vec<Sum> offset, const Sum* saved,
                     Sum* scores, Sum* grads, Sum delta) const {
    const Vec<Sum> zero(Sum(0)), dropout_factor(Sum(dropout_scale(p_)));
    Vec<Sum> sum = zero, product = zero;
    for (int64_t k = seen.begin; k < seen.end; k += kLanes<Sum>) {
      Vec<Sum> dp = load(grads + k), p;
      Mask<Sum> masked = zero < zero;
      if (saved) {
        p = load(saved + k);
      } else {
        const Vec<Sum> score = load(scores + k);
        masked = score == Vec<Sum>(-Sum(__builtin_inf()));
        p = exp2(exponent(unit_, score, offset));
        store(scores + k, p);
      }
      if (kGeneral && p_.grad_weights.data) dp = dp + load(terms.grad_weights + g * kTileKeys + k);
      if constexpr (kDropout) dp = select(dropout_mask(terms.row[g], k), dp * dropout_factor, zero);
      dp = select(masked, zero, dp);  // 0 * NaN is NaN
      sum = sum + p;
      product = fma(p, dp, product);
      store(grads + k, dp);
    }
    const Sum inverse = normaliser(RowState<Sum>{Sum(0), sum_of(sum)});
    return {inverse, sum_of(product) * inverse + delta};
  }

  // Pd and dX of kLanes scores of row g of the group; dS goes to the memory for those that take it.
  template <bool kGeneral, bool kDropout>
  SCALEDOT_INLINE void vector_gradients(const RowGroup& group, int g, int64_t k, Vec<Sum> dropout_factor,
                                        const GroupTerms<Operand>& terms, const BackwardScratch<Operand>& s,
                                        GroupValues& values, Vec<Sum>& weight, Vec<Sum>& grad) const {
    const Vec<Sum> zero(Sum(0));
    const int64_t r = group.r + g;
    Vec<Sum> p = load(values.scores[g] + k), dp = load(s.grads + r * kRowStride<Sum> + k);
    Vec<Sum> difference;  // dP - delta
    if (s.whole[r]) {
      p = p * values.inverse_sum[g];
      difference = dp + values.minus_delta[g];
    } else {
      if (!group.saved) p = exp2(exponent(unit_, p, values.offset[g])) * values.inverse_sum[g];
      if (kGeneral && p_.grad_weights.data) dp = dp + load(terms.grad_weights + g * kTileKeys + k);
      difference = dp + values.minus_delta[g];
      if constexpr (kDropout)
        difference = select(dropout_mask(terms.row[g], k), fma(dp, dropout_factor, values.minus_delta[g]),
                            values.minus_delta[g]);
    }
    weight = p;
    if constexpr (kDropout) weight = select(dropout_mask(terms.row[g], k), p, p * zero);  // NaN stays NaN
    grad = p * difference;
    if constexpr (kGeneral) {
      const bool slopes = has_slopes(group.flags) && !group.saved;
      Vec<Sum> slope = slopes ? load(terms.slopes + g * kTileKeys + k) : Vec<Sum>(Sum(1));
      if constexpr (kGroup > 1) values.sums[g].scores = values.sums[g].scores + grad;
      if (group.flags.replaced) {
        // A replaced score depends on neither the product nor what is added to it. A saved P comes without its slope.
        const Mask<Sum> replaced = bytes_equal<Sum>(terms.row[g].state + k, kReplaced);
        grad = select(replaced, zero, grad);
        slope = select(replaced, zero, slope);
      }
      if (takes_scores_) store(terms.grad_scores + g * kTileKeys + k, grad);
      if (slopes) grad = grad * slope;
      if constexpr (kGroup > 1) {
        values.sums[g].operands = values.sums[g].operands + grad;
        values.sums[g].slopes = fma(p, slope, values.sums[g].slopes);
      }
    }
  }

  // Marks masked elements if something is not finite, and adds dS of the row to the gradients that take it.
  template <bool kGeneral>
  SCALEDOT_INLINE void finish_row(const RowGroup& group, int g, bool finite, const GroupTerms<Operand>& terms,
                                  const BackwardScratch<Operand>& s) const {
    const int64_t r = group.r + g;
    Sum* const own = terms.grad_scores + g * kTileKeys;
    const Sum* scores = kGeneral ? own : s.grads + r * kRowStride<Sum>;
    if (!finite) {
      mark_masked_row(group, g, !kGeneral && takes_scores_ ? scores : nullptr, terms, s);
      scores = own;
    }
    if (mask_.wanted())
      mask_.add(group.tile.batch, head_of(group.tile, r), row_of(group.tile, r), group.keys, group.task, scores);
    if (relative_.wanted()) relative_.add(group.tile, r, group.keys, group.task, scores, s.diagonals);
    if (captured_.wanted()) captured_.add(group.tile, count(group.keys), group.task, scores, terms.row[g].registers);
  }

  // Masked elements of a row become kSkip in the operands, and 0 in dS, which is in terms.grad_scores or copied there
  // from `scores`.
  SCALEDOT_RARE void mark_masked_row(const RowGroup& group, int g, const Sum* scores, const GroupTerms<Operand>& terms,
                                     const BackwardScratch<Operand>& s) const {
    using Element = ElementOf<Operand>;
    const ScoreFlags& flags = group.flags;
    RowTerms<Sum> row = terms.row[g];
    const Range keys = group.keys;
    if (group.saved) load_terms(p_, group.tile, group.r + g, keys, flags, group.ahead, row);
    const int64_t line = group.r / kGroup * kColumnStride<Operand>;
    mark_masked(flags, row, keys, reinterpret_cast<Element*>(s.weights + line) + g, kGroup);
    mark_masked(flags, row, keys, reinterpret_cast<Element*>(s.grad_columns + line) + g, kGroup, OnReplaced::mark);
    if (kGroup > 1)
      mark_masked(flags, row, keys, reinterpret_cast<Element*>(s.grad_rows + (group.r + g) * kRowStride<Operand>), 1,
                  OnReplaced::mark);
    Sum* grads = terms.grad_scores + g * kTileKeys;
    for (int64_t k = 0; scores && k < count(keys); ++k) grads[k] = scores[k];
    clear_masked(flags, row, keys, grads);
  }

  const Problem& p_;
  const MaskGradient<Sum>& mask_;
  const RelativeGradient<Sum>& relative_;
  const CapturedGradients<Sum>& captured_;
  const bool takes_scores_;  // whether something needs dS itself
  const ScoreUnit<Sum> unit_;
};

}  // namespace
}  // namespace scaledot
