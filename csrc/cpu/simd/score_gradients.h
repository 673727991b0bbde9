// From dot products to the gradients of scores, a tile of them at a time (scores.h, for the backward).
#pragma once

#include "cpu/simd/backward_rows.h"

namespace scaledot {
namespace {

template <class Storage, class E>
class ScoreGradients {
  using T = SumOf<E>;
  static constexpr int kGroup = kNumbers<E>;  // rows whose gradients are computed together

 public:
  ScoreGradients(const Problem& p, const MaskGradient<T>& mask) : p_(p), mask_(mask), unit_(unit_of<T>(p)) {}

  // S and dP, then, a group of rows at a time, Pd and dX.
  void run(const RowTile& tile, Range keys, int64_t first, int64_t task, Ahead ahead,
           const BackwardScratch<E>& s) const {
    const int64_t rows = tile_rows(tile);
    const TileTerms terms = tile_terms<T>(p_, tile, keys);
    multiply<Layout::rows, Terms::all>(rows, count(keys), steps_of<E>(p_.head_dim), s.query,
                                       s.key_columns.from_column(first), s.scores, kRowStride<T>, false);
    if (p_.grad_output.data)
      multiply<Layout::rows, Terms::all>(rows, count(keys), steps_of<E>(p_.value_dim), s.grad_output,
                                         s.value_columns.from_column(first), s.grads, kRowStride<T>, false);
    else
      clear_row(s.grads, rows * kRowStride<T>);
    const bool general = has_slopes(terms) || p_.grad_weights.data || (mask_.wanted() && !scores_are_operands(s));
    GroupTerms<E> group = s.group;
    for (int64_t r = 0; r < rows; r += kGroup) {
      if (general)
        p_.dropout_p > 0 ? group_gradients<true, true>(tile, r, keys, terms, task, ahead, group, s)
                         : group_gradients<true, false>(tile, r, keys, terms, task, ahead, group, s);
      else
        p_.dropout_p > 0 ? group_gradients<false, true>(tile, r, keys, terms, task, ahead, group, s)
                         : group_gradients<false, false>(tile, r, keys, terms, task, ahead, group, s);
    }
  }

 private:
  // Whether d score / d (scale * dot product) is anything but 1.
  static bool has_slopes(const TileTerms& terms) { return terms.softcap || terms.replaced; }

  // Whether dS, where it has no slopes, is what lies in s.grad_rows: numbers, and no marks among them.
  static bool scores_are_operands(const BackwardScratch<E>& s) { return kNumbers<E> == 1 && s.finite; }

  // A row all of whose keys are here: its scores become exp(s - offset), its gradients dP, and from these very numbers come what the
  // former sum up to, inverted, and delta.
  struct WholeRow {
    T inverse_sum, delta;
  };
  template <bool kGeneral, bool kDropout>
  WholeRow whole_row(const GroupTerms<E>& group, int g, Range seen, Vec<T> offset, T* scores, T* grads, T delta) const {
    const Vec<T> zero(T(0)), kept(T(dropout_scale(p_)));
    Vec<T> sum = zero, product = zero;
    for (int64_t k = seen.begin; k < seen.end; k += kLanes<T>) {
      const Vec<T> score = load(scores + k), p = exp2(exponent(unit_, score, offset, zero));
      Vec<T> dp = load(grads + k);
      if (kGeneral && p_.grad_weights.data) dp = dp + load(group.grad_weights + g * kTileKeys + k);
      if constexpr (kDropout) dp = select(kept_lanes(group.row[g], k), dp * kept, zero);
      dp = select(score == Vec<T>(-T(__builtin_inf())), zero, dp);  // masked: 0 * NaN is NaN
      sum = sum + p;
      product = fma(p, dp, product);
      store(scores + k, p);
      store(grads + k, dp);
    }
    const T inverse = normaliser(RowState<T>{T(0), sum_of(sum)});
    return {inverse, sum_of(product) * inverse + delta};
  }

  // Rows r, ..., r + kGroup - 1 of the tile. kGeneral: there are slopes, dW, or a place of its own for dS.
  template <bool kGeneral, bool kDropout>
  void group_gradients(const RowTile& tile, int64_t r, Range keys, const TileTerms& terms, int64_t task, Ahead ahead,
                       GroupTerms<E>& group, const BackwardScratch<E>& s) const {
    Finite<T> unused;
    const int here = int(min<int64_t>(kGroup, tile_rows(tile) - r));
    Range seen[kGroup] = {};
    bool finite[kGroup] = {};
    Vec<T> offset[kGroup] = {}, log2_sum[kGroup] = {}, inverse_sum[kGroup] = {}, minus_delta[kGroup] = {};
    for (int g = 0; g < here; ++g) {
      RowTerms<T>& row = group.row[g];
      load_terms(p_, tile, r + g, keys, terms, ahead, row, r > 0);
      finish_scores(p_, terms, row, keys, s.scores + (r + g) * kRowStride<T>,
                    kGeneral && has_slopes(terms) ? group.slopes + g * kTileKeys : nullptr);
      seen[g] = seen_vectors(terms, row, keys);
      finite[g] = s.finite;
      offset[g] = Vec<T>(s.shift[r + g].offset);
      log2_sum[g] = Vec<T>(s.shift[r + g].log_sum);
      minus_delta[g] = Vec<T>(-s.delta[r + g]);
      if (kGeneral && p_.grad_weights.data) {
        const Block<Storage> grad =
            block<Storage>(p_, p_.grad_weights, tile.batch, head_of(tile, r + g), row_of(tile, r + g));
        load_row(grad.data + keys.begin * grad.col_stride, grad.col_stride, count(keys),
                 group.grad_weights + g * kTileKeys, unused);
      }
    }
    for (int g = 0; g < here; ++g) {
      if (!s.whole[r + g]) continue;
      const int64_t line = (r + g) * kRowStride<T>;
      const WholeRow whole =
          whole_row<kGeneral, kDropout>(group, g, seen[g], offset[g], s.scores + line, s.grads + line, s.delta[r + g]);
      finite[g] &= (whole.inverse_sum - whole.inverse_sum) + (whole.delta - whole.delta) == T(0);
      inverse_sum[g] = Vec<T>(whole.inverse_sum);
      minus_delta[g] = Vec<T>(-whole.delta);
    }
    const Vec<T> zero(T(0)), kept(T(dropout_scale(p_)));
    const int64_t line = r / kGroup * kColumnStride<E>;
    for (int64_t k = 0; k < count(keys); k += kLanes<T>) {
      Vec<T> weights[kGroup], grads[kGroup];
#pragma GCC unroll 2
      for (int g = 0; g < kGroup; ++g) {
        weights[g] = grads[g] = zero;
        if (k < seen[g].begin || k >= seen[g].end) {
          if (kGeneral && mask_.wanted()) store(group.grad_scores + g * kTileKeys + k, zero);
          continue;
        }
        Vec<T> p = load(s.scores + (r + g) * kRowStride<T> + k), dp = load(s.grads + (r + g) * kRowStride<T> + k);
        Vec<T> difference;
        if (s.whole[r + g]) {
          p = p * inverse_sum[g];
          difference = dp + minus_delta[g];
        } else {
          p = exp2(exponent(unit_, p, offset[g], log2_sum[g]));
          if (kGeneral && p_.grad_weights.data) dp = dp + load(group.grad_weights + g * kTileKeys + k);
          difference = dp + minus_delta[g];
          if constexpr (kDropout)
            difference = select(kept_lanes(group.row[g], k), fma(dp, kept, minus_delta[g]), minus_delta[g]);
        }
        weights[g] = p;
        if constexpr (kDropout) weights[g] = select(kept_lanes(group.row[g], k), p, zero);
        grads[g] = p * difference;
        if constexpr (kGeneral) {
          if (mask_.wanted()) store(group.grad_scores + g * kTileKeys + k, grads[g]);
          if (has_slopes(terms)) grads[g] = grads[g] * load(group.slopes + g * kTileKeys + k);
          if (terms.replaced) grads[g] = select(bytes_equal<T>(group.row[g].state + k, kReplaced), zero, grads[g]);
        }
      }
      Operand<E>::store_across(s.weights + line + k, weights);
      Operand<E>::store_across(s.grad_columns + line + k, grads);
      if constexpr (kGroup > 1)
        for (int g = 0; g < here; ++g) Operand<E>::store_along(s.grad_rows + (r + g) * kRowStride<E>, k, grads[g]);
    }
    for (int g = 0; g < here; ++g) {
      T* const own = group.grad_scores + g * kTileKeys;
      const T* scores = kGeneral ? own : s.grads + (r + g) * kRowStride<T>;
      if (!finite[g]) {
        if (!kGeneral && mask_.wanted())
          for (int64_t k = 0; k < count(keys); ++k) own[k] = scores[k];
        scores = own;
        mark_masked_row(r + g, keys, terms, group, s);
      }
      if (mask_.wanted()) mask_.add(tile.batch, head_of(tile, r + g), row_of(tile, r + g), keys, task, scores);
    }
  }

  // Masked elements of row r: kSkip in the operands, 0 in the mask's gradient.
  void mark_masked_row(int64_t r, Range keys, const TileTerms& terms, const GroupTerms<E>& group,
                       const BackwardScratch<E>& s) const {
    using Number = NumberOf<E>;
    const int g = int(r % kGroup);
    const int64_t line = r / kGroup * kColumnStride<E>;
    mark_masked(terms, group.row[g], keys, reinterpret_cast<Number*>(s.weights + line) + g, kGroup);
    mark_masked(terms, group.row[g], keys, reinterpret_cast<Number*>(s.grad_columns + line) + g, kGroup);
    if (kGroup > 1)
      mark_masked(terms, group.row[g], keys, reinterpret_cast<Number*>(s.grad_rows + r * kRowStride<E>), 1);
    T* grads = group.grad_scores + g * kTileKeys;
    mark_masked(terms, group.row[g], keys, grads, 1);
    for (int64_t k = 0; k < count(keys); ++k) grads[k] = is_skip(grads[k]) ? T(0) : grads[k];
  }

  const Problem& p_;
  const MaskGradient<T>& mask_;
  const Unit<T> unit_;
};

}  // namespace
}  // namespace scaledot
