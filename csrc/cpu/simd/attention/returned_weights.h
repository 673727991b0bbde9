// The weights that a forward returns, after dropout.
//
//   W = drop(P) exp(m' - m) / (l (1 - dropout_p))       P is of the lazy maximum m' at the tile; m: the last
//   W = drop(exp(S - m)) / (l (1 - dropout_p))          otherwise: a second pass over the keys
// The mean over the heads is a sum that a task keeps for its rows (ForwardScratch::mean) and adds to, head by head.
#pragma once

#include "cpu/simd/attention/head_panels.h"

namespace scaledot {
namespace {

template <class Operand>
class ReturnedWeights {
  using Sum = SumOf<Operand>;

 public:
  ReturnedWeights(const Problem& p, const ForwardPlan<Operand>& plan, const HeadPanels<Operand>& heads)
      : p_(p), plan_(plan), heads_(heads) {}

  // The weights of a query tile. `in_tiles`: s.weight_tiles has those of all key tiles.
  void write(const QueryTile& tile, int64_t slot, bool in_tiles, const ForwardScratch<Operand>& s) const {
    if (in_tiles && finite_factors(tile, s))
      with_storage_of<Operand>(p_.dtype, [&]<class Storage>(Type<Storage>) { write_tiles<Storage>(tile, s); });
    else
      write_recomputed(tile, slot, s);
  }

  void begin_mean(const QueryTile& tile, const ForwardScratch<Operand>& s) const {
    clear_row(s.mean, count(tile.rows) * mean_stride<Sum>(p_));
  }
  void end_mean(const QueryTile& tile, const ForwardScratch<Operand>& s) const {
    for (int64_t r = 0; r < count(tile.rows); ++r)
      with_storage_of<Operand>(p_.dtype, [&]<class Storage>(Type<Storage>) {
        narrow_row(s.mean + r * mean_stride<Sum>(p_), Sum(1) / Sum(p_.heads), p_.key_length,
                   weights_row<Storage>(tile, r));
      });
  }

 private:
  Sum factor(const ScoreUnit<Sum>& unit, const ForwardScratch<Operand>& s, int64_t r) const {
    return normaliser(state_of(s.softmax, r, unit)) * Sum(dropout_scale(p_));
  }

  // If a factor is non-finite, masked weights must still be exactly 0, so the mask is applied again (write_recomputed).
  bool finite_factors(const QueryTile& tile, const ForwardScratch<Operand>& s) const {
    const ScoreUnit<Sum> unit = score_unit<Sum>(p_, tile);
    bool finite = true;
    for (int64_t r = 0; r < tile_rows(tile); ++r) finite &= factor(unit, s, r) - factor(unit, s, r) == Sum(0);
    return finite;
  }

  template <class Storage>
  void write_tiles(const QueryTile& tile, const ForwardScratch<Operand>& s) const {
    const ScoreUnit<Sum> unit = score_unit<Sum>(p_, tile);
    for (int64_t r = 0; r < tile_rows(tile); ++r) {
      const Sum normalise = factor(unit, s, r), lazy_max = s.softmax.lazy_max[r];
      int64_t written = 0;
      for (int64_t t = 0; t < heads_.key_tiles(); ++t) {
        const Range keys = s.pending_keys[t];
        if (count(keys) <= 0) continue;
        put_zeros<Storage>(tile, r, {written, keys.begin});
        const Sum taken = s.pending_max[t * kShortTileRows + r];
        const Sum raised = taken == lazy_max ? Sum(1) : maximum_of(exp2(Vec<Sum>((taken - lazy_max) * unit.log2)));
        put<Storage>(tile, r, keys, s.weight_tiles + (t * kShortTileRows + r) * kRowStride<Sum>, raised * normalise, s);
        written = keys.end;
      }
      put_zeros<Storage>(tile, r, {written, p_.key_length});
    }
  }

  SCALEDOT_NOINLINE void write_recomputed(const QueryTile& tile, int64_t slot, const ForwardScratch<Operand>& s) const {
    const ScoreUnit<Sum> unit = score_unit<Sum>(p_, tile);
    RowTerms<Sum> row = s.terms;
    int64_t written = 0;  // keys, the same for all rows
    const auto clear_to = [&](int64_t end) {
      with_storage_of<Operand>(p_.dtype, [&]<class Storage>(Type<Storage>) {
        for (int64_t r = 0; r < tile_rows(tile); ++r) put_zeros<Storage>(tile, r, {written, end});
      });
    };
    heads_.for_each_score_tile(tile, slot, {0, heads_.key_tiles()}, s, false, [&](const ScoreTile<Operand>& v) {
      clear_to(v.keys.begin);
      written = v.keys.end;
      for (int64_t r = 0; r < tile_rows(tile); ++r) {
        Sum* scores = v.scores + r * kRowStride<Sum>;
        load_terms(p_, tile, r, v.keys, v.flags, kNextKeys, row, r > 0);
        finish_scores_outlined<Sum>(p_, v.flags, row, v.keys, scores, nullptr);
        weights_of(v.flags, row, v.keys, unit, s.softmax.lazy_max[r], factor(unit, s, r), scores);
        with_storage_of<Operand>(
            p_.dtype, [&]<class Storage>(Type<Storage>) { put<Storage>(tile, r, v.keys, scores, Sum(1), s); });
      }
    });
    clear_to(p_.key_length);
  }

  // Scores to factor * drop(exp(score - lazy_max)), in place; 0 at masked keys even if the factor is NaN.
  void weights_of(const ScoreFlags& flags, const RowTerms<Sum>& row, Range keys, const ScoreUnit<Sum>& unit,
                  Sum row_max, Sum factor, Sum* scores) const {
    const Range seen = seen_vectors(row, keys);
    const Vec<Sum> lazy_max(shift(row_max)), log2(unit.log2), zero(Sum(0)), times(factor);
    for (int64_t k = 0; k < seen.begin; k += kLanes<Sum>) store(scores + k, zero);
    for (int64_t k = seen.begin; k < seen.end; k += kLanes<Sum>) {
      Vec<Sum> w = exp2((load(scores + k) - lazy_max) * log2) * times;
      if (p_.dropout_p > 0) w = select(dropout_mask(row, k), w, w * zero);
      store(scores + k, w);
    }
    for (int64_t k = seen.end; k < count(keys); k += kLanes<Sum>) store(scores + k, zero);
    if (!(factor - factor == Sum(0))) clear_masked(flags, row, keys, scores);
  }

  // Weights go to the tensor, or are added to the mean. Past the last key they are 0, up to a whole vector.
  template <class Storage>
  void put(const QueryTile& tile, int64_t r, Range keys, const Sum* from, Sum factor,
           const ForwardScratch<Operand>& s) const {
    if (!plan_.average_tasks) return narrow_row(from, factor, count(keys), weights_row<Storage>(tile, r) + keys.begin);
    Sum* to = s.mean + (row_of(tile, r) - tile.rows.begin) * mean_stride<Sum>(p_) + keys.begin;
    for (int64_t k = 0; k < count(keys); k += kLanes<Sum>)
      store(to + k, fma(load(from + k), Vec<Sum>(factor), load(to + k)));
  }
  template <class Storage>
  void put_zeros(const QueryTile& tile, int64_t r, Range keys) const {
    if (!plan_.average_tasks) clear_row(weights_row<Storage>(tile, r) + keys.begin, count(keys));
  }

  template <class Storage>
  Storage* weights_row(const QueryTile& tile, int64_t r) const {
    return element_ptr<Storage>(p_, p_.weights, tile.batch, head_of(tile, r)) + row_of(tile, r) * p_.weights.row_stride;
  }

  const Problem& p_;
  const ForwardPlan<Operand>& plan_;
  const HeadPanels<Operand>& heads_;
};

}  // namespace
}  // namespace scaledot
