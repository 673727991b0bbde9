// From dot products to scores, one row of a tile at a time, for the forward, the backward and the returned weights.
// core/mask.h says what a score is.
#pragma once

#include "core/softmax.h"
#include "cpu/simd/attention/masking.h"

namespace scaledot {
namespace {

// The unit of stored scores. If a score is only scale * dot product, the dot products themselves are stored, and the
// exponential applies the scale. Quantised keys have a scale for each KV head, and with it a unit.
template <class Sum>
struct ScoreUnit {
  bool raw;     // dot products are stored
  Sum natural;  // score = natural * stored
  Sum log2;     // score / ln 2 = log2 * stored
};

template <class Sum>
inline ScoreUnit<Sum> score_unit(const Problem& p, double k_scale = 1) {
  const bool plain = !has_slopes(p) && !mask_use(p).additive;
  const double scale = p.scale * k_scale;
  const bool raw = plain && scale_folds_into_exp<Sum>(scale);
  return raw ? ScoreUnit<Sum>{true, Sum(scale), Sum(scale * kLog2e)} : ScoreUnit<Sum>{false, Sum(1), Sum(kLog2e)};
}
template <class Sum>
inline ScoreUnit<Sum> score_unit(const Problem& p, const QueryTile& tile) {
  return score_unit<Sum>(p, cache_scale(p, p.k_scale, tile.batch, tile.kv_head));
}

template <class Sum>
inline ScoreFlags score_flags(const Problem& p, const QueryTile& tile, Range keys) {
  const TileKind blocks = block_tile_kind(p, tile, keys);
  const bool whole = tile_kind(p, tile.rows, keys) == TileKind::full, full = whole && blocks == TileKind::full;
  const bool one_row = !p.attn_mask.row_stride && (!p.attn_mask.head_stride || tile.heads == 1);
  const bool alike = full && !p.score_program && !p.alibi_slopes.data && (!has_mask(p, keys) || one_row) &&
                     has_one_relative_bias(p, tile, keys);
  const MaskUse use = mask_use(p, keys);
  const bool replaced = use.boolean && !masked_is_excluded(p);
  const bool partial = !whole || count(keys) % kLanes<Sum> != 0;
  const MaskForm by_key = partial ? MaskForm::range : MaskForm::none;
  const MaskForm mask = use.boolean ? MaskForm::states : blocks == TileKind::full ? by_key : MaskForm::blocks;
  return {score_unit<Sum>(p, tile).raw,
          p.softcap > 0,
          p.score_program != nullptr,
          use.additive,
          replaced,
          mask,
          full,
          alike};
}

// Dot products to capped scores, in place. `slopes`, which may be nullptr: d score / d (scale * dot product).
template <class Sum>
SCALEDOT_INLINE void cap_scores(Range seen, Sum scale, Sum softcap, Sum* scores, Sum* slopes) {
  for (int64_t k = seen.begin; k < seen.end; k += kLanes<Sum>) {
    const Vec<Sum> s = capped(load(scores + k) * Vec<Sum>(scale), softcap);
    store(scores + k, s);
    if (slopes) store(slopes + k, capped_slope(s, softcap));
  }
}

// Adds biases to scale * `scores`, and replaces masked scores by masked_score. These have the slope 0.
template <class Sum>
SCALEDOT_INLINE void add_terms(const Problem& p, const ScoreFlags& flags, const RowTerms<Sum>& row, Range seen,
                               Sum scale, Sum* scores, Sum* slopes) {
  const Vec<Sum> masked(-Sum(__builtin_inf())), masked_score(Sum(p.masked_score)), zero(Sum(0)), one(Sum(1));
  for (int64_t k = seen.begin; k < seen.end; k += kLanes<Sum>) {
    const Vec<Sum> x = load(scores + k);
    Vec<Sum> s = x * Vec<Sum>(scale);
    if (flags.additive) {
      // fma by name: every copy of this function has to round alike, so that recomputed scores have the same bits.
      const Vec<Sum> bias = load(row.additive + k);
      s = select(bias == masked, masked, fma(x, Vec<Sum>(scale), bias));
    }
    if (flags.replaced) {
      const Mask<Sum> replaced = bytes_equal<Sum>(row.state + k, kReplaced);
      s = select(replaced, masked_score, s);
      if (slopes) store(slopes + k, select(replaced, zero, flags.softcap || flags.program ? load(slopes + k) : one));
    }
    store(scores + k, s);
  }
}

// Dot products to the scores of the score program, in place. `slopes` as in cap_scores.
template <class Sum>
SCALEDOT_NOINLINE void run_program(const Problem& p, const ScoreFlags& flags, const RowTerms<Sum>& row, Range keys,
                                   Range seen, Sum* scores, Sum* slopes) {
  struct Row {
    ScoreFlags flags;
    const RowTerms<Sum>& terms;
    Range keys;
    static bool is_live(const void* self, int64_t k) {
      const Row& r = *static_cast<const Row*>(self);
      return !is_masked(r.flags, r.terms, r.keys, k);
    }
  } context = {flags, row, keys};
  context.flags.program = false;  // its result is not known yet
  ScoreInterpreter<Sum>(p, row.registers).run_row(seen, row.scale, {&Row::is_live, &context}, scores, slopes);
}

// A row of dot products to stored scores, in place. Masked ones become -inf. `slopes`: d score / d (scale * dot
// product) if there is a softcap, a score program or a replaced score; may be nullptr.
template <class Sum>
SCALEDOT_INLINE void finish_scores(const Problem& p, const ScoreFlags& flags, const RowTerms<Sum>& row, Range keys,
                                   Sum* scores, Sum* slopes) {
  const Range seen = seen_vectors(row, keys);
  const Sum scale = row.scale, softcap = Sum(p.softcap);  // copied: for all the compiler knows, `scores` may alias them
  if (flags.softcap) cap_scores(seen, scale, softcap, scores, slopes);
  if (flags.program) run_program(p, flags, row, keys, seen, scores, slopes);
  const bool computed = flags.softcap || flags.program;
  if (flags.additive || flags.replaced || !(flags.raw || computed))
    add_terms(p, flags, row, seen, computed ? Sum(1) : scale, scores, slopes);
  const Vec<Sum> masked(-Sum(__builtin_inf()));
  if (row.mask == MaskForm::states) {
    for (int64_t k = seen.begin; k < seen.end; k += kLanes<Sum>)
      store(scores + k, select(bytes_equal<Sum>(row.state + k, kMasked), masked, load(scores + k)));
  } else if (row.mask == MaskForm::range && count(seen) > 0) {
    // In vectors: a vector that is loaded right after single elements were stored has to wait for them.
    const int64_t last = seen.end - kLanes<Sum>;
    const auto before = [](int64_t k, int64_t end) { return lane_numbers<Sum>() < Vec<Sum>(Sum(end - k)); };
    if (row.live.begin > seen.begin)
      store(scores + seen.begin, select(before(seen.begin, row.live.begin), masked, load(scores + seen.begin)));
    if (row.live.end < seen.end) store(scores + last, select(before(last, row.live.end), load(scores + last), masked));
  }
}

// finish_scores, not inlined, for every caller except the forward, where the call would take 1% of the time.
template <class Sum>
SCALEDOT_NOINLINE void finish_scores_outlined(const Problem& p, const ScoreFlags& flags, const RowTerms<Sum>& row,
                                              Range keys, Sum* scores, Sum* slopes) {
  finish_scores(p, flags, row, keys, scores, slopes);
}

}  // namespace
}  // namespace scaledot
