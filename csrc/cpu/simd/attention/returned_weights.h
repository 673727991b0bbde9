// The weights that a forward returns, after dropout.
//
//   W = drop(P) exp(m' - m) / (l (1 - dropout_p))       P was computed with the reference m' and saved; m is the last
//   W = drop(exp(S - m)) / (l (1 - dropout_p))          otherwise: a second pass over the keys
// The mean over the heads is a sum that a task keeps for its rows (ForwardScratch::mean) and adds to, head by head.
#pragma once

#include "cpu/simd/attention/packed_heads.h"

namespace scaledot {
namespace {

template <class E>
class ReturnedWeights {
  using T = SumOf<E>;

 public:
  ReturnedWeights(const Problem& p, const ForwardPlan<E>& plan, const PackedHeads<E>& heads)
      : p_(p), plan_(plan), heads_(heads) {}

  // The weights of a query tile. `saved`: s.saved has P of all key tiles.
  void write(const QueryTile& tile, int64_t slot, bool saved, const ForwardScratch<E>& s) const {
    if (saved && finite_factors(tile, s))
      with_storage_of<E>(p_.dtype, [&]<class Storage>(Type<Storage>) { write_saved<Storage>(tile, s); });
    else
      write_recomputed(tile, slot, s);
  }

  void begin_mean(const QueryTile& tile, const ForwardScratch<E>& s) const {
    clear_row(s.mean, count(tile.rows) * mean_stride<T>(p_));
  }
  void end_mean(const QueryTile& tile, const ForwardScratch<E>& s) const {
    for (int64_t r = 0; r < count(tile.rows); ++r)
      with_storage_of<E>(p_.dtype, [&]<class Storage>(Type<Storage>) {
        narrow_row(s.mean + r * mean_stride<T>(p_), T(1) / T(p_.heads), p_.key_length, weights_row<Storage>(tile, r));
      });
  }

 private:
  T factor(const ScoreUnit<T>& unit, const ForwardScratch<E>& s, int64_t r) const {
    return normaliser(state_of(s.softmax, r, unit)) * T(dropout_scale(p_));
  }

  // If a factor is non-finite, masked weights must still be exactly 0, so the mask is applied again (write_recomputed).
  bool finite_factors(const QueryTile& tile, const ForwardScratch<E>& s) const {
    const ScoreUnit<T> unit = score_unit<T>(p_, tile);
    bool finite = true;
    for (int64_t r = 0; r < tile_rows(tile); ++r) finite &= factor(unit, s, r) - factor(unit, s, r) == T(0);
    return finite;
  }

  template <class Storage>
  void write_saved(const QueryTile& tile, const ForwardScratch<E>& s) const {
    const ScoreUnit<T> unit = score_unit<T>(p_, tile);
    for (int64_t r = 0; r < tile_rows(tile); ++r) {
      const T normalise = factor(unit, s, r), reference = s.softmax.reference[r];
      int64_t written = 0;
      for (int64_t t = 0; t < heads_.key_tiles(); ++t) {
        const Range keys = s.pending_keys[t];
        if (count(keys) <= 0) continue;
        put_zeros<Storage>(tile, r, {written, keys.begin});
        const T taken = s.pending_max[t * kShortTileRows + r];
        const T raised = taken == reference ? T(1) : maximum_of(exp2(Vec<T>((taken - reference) * unit.log2)));
        put<Storage>(tile, r, keys, s.saved + (t * kShortTileRows + r) * kRowStride<T>, raised * normalise, s);
        written = keys.end;
      }
      put_zeros<Storage>(tile, r, {written, p_.key_length});
    }
  }

  SCALEDOT_NOINLINE void write_recomputed(const QueryTile& tile, int64_t slot, const ForwardScratch<E>& s) const {
    const ScoreUnit<T> unit = score_unit<T>(p_, tile);
    RowTerms<T> row = s.terms;
    int64_t written = 0;  // keys, the same for all rows
    const auto clear_to = [&](int64_t end) {
      with_storage_of<E>(p_.dtype, [&]<class Storage>(Type<Storage>) {
        for (int64_t r = 0; r < tile_rows(tile); ++r) put_zeros<Storage>(tile, r, {written, end});
      });
    };
    heads_.for_each_score_tile(tile, slot, {0, heads_.key_tiles()}, s, false, [&](const ScoreTile<E>& v, auto&) {
      clear_to(v.keys.begin);
      written = v.keys.end;
      for (int64_t r = 0; r < tile_rows(tile); ++r) {
        T* scores = v.scores + r * kRowStride<T>;
        load_terms(p_, tile, r, v.keys, v.flags, kNextKeys, row, r > 0);
        finish_scores_apart<T>(p_, v.flags, row, v.keys, scores, nullptr);
        weights_of(v.flags, row, v.keys, unit, s.softmax.reference[r], factor(unit, s, r), scores);
        with_storage_of<E>(p_.dtype,
                           [&]<class Storage>(Type<Storage>) { put<Storage>(tile, r, v.keys, scores, T(1), s); });
      }
    });
    clear_to(p_.key_length);
  }

  // Scores to factor * drop(exp(score - reference)), in place; 0 at masked keys even if the factor is NaN.
  void weights_of(const ScoreFlags& flags, const RowTerms<T>& row, Range keys, const ScoreUnit<T>& unit,
                  T row_reference, T factor, T* scores) const {
    const Range seen = seen_vectors(row, keys);
    const Vec<T> reference(shift(row_reference)), log2(unit.log2), zero(T(0)), times(factor);
    for (int64_t k = 0; k < seen.begin; k += kLanes<T>) store(scores + k, zero);
    for (int64_t k = seen.begin; k < seen.end; k += kLanes<T>) {
      Vec<T> w = exp2((load(scores + k) - reference) * log2) * times;
      if (p_.dropout_p > 0) w = select(dropout_mask(row, k), w, w * zero);
      store(scores + k, w);
    }
    for (int64_t k = seen.end; k < count(keys); k += kLanes<T>) store(scores + k, zero);
    if (!(factor - factor == T(0))) {
      mark_masked(flags, row, keys, scores, 1);
      for (int64_t k = 0; k < count(keys); ++k) scores[k] = is_skip(scores[k]) ? T(0) : scores[k];
    }
  }

  // Weights go to the tensor, or are added to the mean. Past the last key they are 0, up to a whole vector.
  template <class Storage>
  void put(const QueryTile& tile, int64_t r, Range keys, const T* from, T factor, const ForwardScratch<E>& s) const {
    if (!plan_.average_tasks) return narrow_row(from, factor, count(keys), weights_row<Storage>(tile, r) + keys.begin);
    T* to = s.mean + (row_of(tile, r) - tile.rows.begin) * mean_stride<T>(p_) + keys.begin;
    for (int64_t k = 0; k < count(keys); k += kLanes<T>)
      store(to + k, fma(load(from + k), Vec<T>(factor), load(to + k)));
  }
  template <class Storage>
  void put_zeros(const QueryTile& tile, int64_t r, Range keys) const {
    if (!plan_.average_tasks) clear_row(weights_row<Storage>(tile, r) + keys.begin, count(keys));
  }

  template <class Storage>
  Storage* weights_row(const QueryTile& tile, int64_t r) const {
    return at<Storage>(p_, p_.weights, tile.batch, head_of(tile, r)) + row_of(tile, r) * p_.weights.row_stride;
  }

  const Problem& p_;
  const ForwardPlan<E>& plan_;
  const PackedHeads<E>& heads_;
};

}  // namespace
}  // namespace scaledot
