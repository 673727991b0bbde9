// From dot products to scores, one row of a tile at a time, for the forward, the backward and the returned weights.
// core/mask.h says what a score is.
#pragma once

#include "core/softmax.h"
#include "cpu/simd/attention/masking.h"

namespace scaledot {
namespace {

// The unit of stored scores. If a score is only scale * dot product, the dot products themselves are stored, and the
// exponential applies the scale.
template <class T>
struct ScoreUnit {
  bool raw;   // dot products are stored
  T natural;  // score = natural * stored
  T log2;     // score / ln 2 = log2 * stored
};

template <class T>
inline ScoreUnit<T> score_unit(const Problem& p) {
  const MaskUse use = mask_use(p);
  const bool replaces = use.boolean && !masked_is_excluded(p);
  const bool plain = p.softcap == 0 && !use.additive && !replaces && !p.k_scale.data;
  const bool raw = plain && scale_folds_into_exp<T>(p.scale);
  return raw ? ScoreUnit<T>{true, T(p.scale), T(p.scale * kLog2e)} : ScoreUnit<T>{false, T(1), T(kLog2e)};
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
  return {score_unit<T>(p).raw, p.softcap > 0, use.additive, replaced, mask, full, alike};
}

// kLanes dot products to stored scores, before masks exclude any. *slope becomes d score / d (scale * dot product).
template <class T>
SCALEDOT_INLINE Vec<T> score(const Problem& p, const ScoreFlags& flags, const RowTerms<T>& row, int64_t k, Vec<T> dot,
                             Vec<T>* slope) {
  if (slope) *slope = Vec<T>(T(1));
  if (flags.raw) return dot;
  Vec<T> s = dot * Vec<T>(row.scale);
  if (flags.softcap) {
    s = capped(s, T(p.softcap));
    if (slope) *slope = capped_slope(s, T(p.softcap));
  }
  if (flags.additive) {
    const Vec<T> bias = load(row.additive + k), masked(-T(__builtin_inf()));
    s = select(bias == masked, masked, s + bias);
  }
  if (flags.replaced) {
    const Mask<T> replaced = bytes_equal<T>(row.state + k, kReplaced);
    s = select(replaced, Vec<T>(T(p.masked_score)), s);
    if (slope) *slope = select(replaced, Vec<T>(T(0)), *slope);
  }
  return s;
}

// A row of dot products to stored scores, in place. Masked ones become -inf. `slopes`: see score(); may be nullptr.
template <class T>
SCALEDOT_INLINE void finish_scores(const Problem& p, const ScoreFlags& flags, const RowTerms<T>& row, Range keys,
                                   T* scores, T* slopes) {
  const Range seen = seen_vectors(row, keys);
  if (!flags.raw)
    for (int64_t k = seen.begin; k < seen.end; k += kLanes<T>) {
      Vec<T> slope;
      store(scores + k, score(p, flags, row, k, load(scores + k), slopes ? &slope : nullptr));
      if (slopes) store(slopes + k, slope);
    }
  const Vec<T> masked(-T(__builtin_inf()));
  if (row.mask == MaskForm::states) {
    for (int64_t k = seen.begin; k < seen.end; k += kLanes<T>)
      store(scores + k, select(bytes_equal<T>(row.state + k, kMasked), masked, load(scores + k)));
  } else if (row.mask == MaskForm::range) {
    for (int64_t k = seen.begin; k < row.live.begin; ++k) scores[k] = -T(__builtin_inf());
    for (int64_t k = row.live.end; k < seen.end; ++k) scores[k] = -T(__builtin_inf());
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
