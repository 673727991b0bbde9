// From dot products to scores, one row of a tile at a time, for the forward, the backward and the returned weights.
// core/mask.h says what a score is.
#pragma once

#include "core/softmax.h"
#include "cpu/simd/attention/masking.h"

namespace scaledot {
namespace {

// The unit of stored scores. If a score is only scale * dot product, the dot products themselves are stored, and the
// exponential applies the scale. Quantised keys have a scale for each kv head, and with it a unit.
template <class T>
struct ScoreUnit {
  bool raw;   // dot products are stored
  T natural;  // score = natural * stored
  T log2;     // score / ln 2 = log2 * stored
};

template <class T>
inline ScoreUnit<T> score_unit(const Problem& p, double k_scale = 1) {
  const MaskUse use = mask_use(p);
  const bool replaces = use.boolean && !masked_is_excluded(p);
  const bool plain = p.softcap == 0 && !use.additive && !replaces;
  const double scale = p.scale * k_scale;
  const bool raw = plain && scale_folds_into_exp<T>(scale);
  return raw ? ScoreUnit<T>{true, T(scale), T(scale * kLog2e)} : ScoreUnit<T>{false, T(1), T(kLog2e)};
}
template <class T>
inline ScoreUnit<T> score_unit(const Problem& p, const QueryTile& tile) {
  return score_unit<T>(p, cache_scale(p, p.k_scale, tile.batch, tile.kv_head));
}

template <class T>
inline ScoreFlags score_flags(const Problem& p, const QueryTile& tile, Range keys) {
  const TileKind blocks = block_tile_kind(p, tile, keys);
  const bool whole = tile_kind(p, tile.rows, keys) == TileKind::full, full = whole && blocks == TileKind::full;
  const bool one_row = !p.attn_mask.row_stride && (!p.attn_mask.head_stride || tile.heads == 1);
  const bool alike =
      full && !p.alibi_slopes.data && (!p.attn_mask.data || one_row) && has_one_relative_bias(p, tile, keys);
  const MaskUse use = mask_use(p);
  const bool replaced = use.boolean && !masked_is_excluded(p);
  const bool partial = !whole || count(keys) % kLanes<T> != 0;
  const MaskForm by_key = partial ? MaskForm::range : MaskForm::none;
  const MaskForm mask = use.boolean ? MaskForm::states : blocks == TileKind::full ? by_key : MaskForm::blocks;
  return {score_unit<T>(p, tile).raw, p.softcap > 0, use.additive, replaced, mask, full, alike};
}

// Dot products to capped scores, in place. `slopes`, which may be nullptr: d score / d (scale * dot product).
template <class T>
SCALEDOT_INLINE void cap_scores(Range seen, T scale, T softcap, T* scores, T* slopes) {
  for (int64_t k = seen.begin; k < seen.end; k += kLanes<T>) {
    const Vec<T> s = capped(load(scores + k) * Vec<T>(scale), softcap);
    store(scores + k, s);
    if (slopes) store(slopes + k, capped_slope(s, softcap));
  }
}

// Adds biases to scale * `scores`, and replaces masked scores by masked_score. These have the slope 0.
template <class T>
SCALEDOT_INLINE void add_terms(const Problem& p, const ScoreFlags& flags, const RowTerms<T>& row, Range seen, T scale,
                               T* scores, T* slopes) {
  const Vec<T> masked(-T(__builtin_inf())), masked_score(T(p.masked_score)), zero(T(0)), one(T(1));
  for (int64_t k = seen.begin; k < seen.end; k += kLanes<T>) {
    const Vec<T> x = load(scores + k);
    Vec<T> s = x * Vec<T>(scale);
    if (flags.additive) {
      // fma by name: every copy of this function has to round alike, so that recomputed scores have the same bits.
      const Vec<T> bias = load(row.additive + k);
      s = select(bias == masked, masked, fma(x, Vec<T>(scale), bias));
    }
    if (flags.replaced) {
      const Mask<T> replaced = bytes_equal<T>(row.state + k, kReplaced);
      s = select(replaced, masked_score, s);
      if (slopes) store(slopes + k, select(replaced, zero, flags.softcap ? load(slopes + k) : one));
    }
    store(scores + k, s);
  }
}

// A row of dot products to stored scores, in place. Masked ones become -inf. `slopes`: d score / d (scale * dot
// product) if there is a softcap or a replaced score; may be nullptr.
template <class T>
SCALEDOT_INLINE void finish_scores(const Problem& p, const ScoreFlags& flags, const RowTerms<T>& row, Range keys,
                                   T* scores, T* slopes) {
  const Range seen = seen_vectors(row, keys);
  const T scale = row.scale, softcap = T(p.softcap);  // copied: for all the compiler knows, `scores` may alias them
  if (flags.softcap) cap_scores(seen, scale, softcap, scores, slopes);
  if (flags.additive || flags.replaced || !(flags.raw || flags.softcap))
    add_terms(p, flags, row, seen, flags.softcap ? T(1) : scale, scores, slopes);
  const Vec<T> masked(-T(__builtin_inf()));
  if (row.mask == MaskForm::states) {
    for (int64_t k = seen.begin; k < seen.end; k += kLanes<T>)
      store(scores + k, select(bytes_equal<T>(row.state + k, kMasked), masked, load(scores + k)));
  } else if (row.mask == MaskForm::range && count(seen) > 0) {
    // In vectors: a vector that is loaded right after single elements were stored has to wait for them.
    const int64_t last = seen.end - kLanes<T>;
    const auto before = [](int64_t k, int64_t end) { return lane_numbers<T>() < Vec<T>(T(end - k)); };
    if (row.live.begin > seen.begin)
      store(scores + seen.begin, select(before(seen.begin, row.live.begin), masked, load(scores + seen.begin)));
    if (row.live.end < seen.end) store(scores + last, select(before(last, row.live.end), load(scores + last), masked));
  }
}

// The same, not inlined: for all but the forward, where the call would take 1% of the time.
template <class T>
SCALEDOT_NOINLINE void finish_scores_apart(const Problem& p, const ScoreFlags& flags, const RowTerms<T>& row,
                                           Range keys, T* scores, T* slopes) {
  finish_scores(p, flags, row, keys, scores, slopes);
}

}  // namespace
}  // namespace scaledot
