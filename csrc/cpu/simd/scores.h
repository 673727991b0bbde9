// From dot products to weights, one row of a tile at a time; forward, backward and weights all come through here.
// core/mask.h says what a score is.
#pragma once

#include "core/mask.h"
#include "core/philox.h"
#include "core/softmax.h"
#include "cpu/simd/pack.h"

namespace scaledot {
namespace {

// Which rows a task works on: the same `count` rows of `heads` neighbouring query heads that share one key head, stacked
// (grouped-query attention with few rows would otherwise leave most of a tile empty).
struct RowTile {
  int64_t batch;
  int64_t kv_head;
  int64_t first_head;
  int64_t heads;
  Range rows;
};

inline int64_t count(Range r) { return r.end - r.begin; }
inline int64_t tile_rows(const RowTile& t) { return t.heads * count(t.rows); }
inline int64_t head_of(const RowTile& t, int64_t r) { return t.first_head + r / count(t.rows); }
inline int64_t row_of(const RowTile& t, int64_t r) { return t.rows.begin + r % count(t.rows); }

// How the (batch, kv_head) planes of a problem are cut into row tiles.
struct Tiling {
  int64_t rows;        // per head in a tile
  int64_t heads;       // per tile
  int64_t row_tiles;   // per head
  int64_t head_tiles;  // per plane
};

inline Tiling tile_problem(const Problem& p) {
  const int64_t group = p.heads / p.kv_heads;
  const int64_t row_tiles = larger<int64_t>(ceil_div(p.query_length, kTileRows), 1);
  const int64_t rows = larger<int64_t>(ceil_div(p.query_length, row_tiles), 1);
  const int64_t heads = smaller(group, larger<int64_t>(kTileRows / rows, 1));
  return {rows, heads, row_tiles, ceil_div(group, heads)};
}

inline int64_t tiles_per_plane(const Tiling& t) { return t.row_tiles * t.head_tiles; }

// Tile `index` of a plane; later rows first, because under a causal mask they have the most keys.
inline RowTile row_tile(const Problem& p, const Tiling& t, int64_t plane, int64_t index) {
  const int64_t kv_head = plane % p.kv_heads, group = p.heads / p.kv_heads;
  const int64_t row = (t.row_tiles - 1 - index / t.head_tiles) * t.rows, head = index % t.head_tiles * t.heads;
  return {plane / p.kv_heads,
          kv_head,
          kv_head * group + head,
          smaller(t.heads, group - head),
          {row, smaller(row + t.rows, p.query_length)}};
}

// A row's mask terms; each array has kTileKeys elements.
template <class T>
struct RowScratch {
  T* additive;
  uint8_t* state;
  uint8_t* keep;  // dropout
};

template <class T>
RowScratch<T> lay_out_row(Arena& arena) {
  return {take<T>(arena, kTileKeys), take<uint8_t>(arena, kTileKeys), take<uint8_t>(arena, kTileKeys)};
}

// What a tile's scores need beyond the scale; decided once a tile.
struct TileTerms {
  bool softcap;
  bool additive;
  bool states;  // some key of some row may not be kLive, or the tile ends inside a vector
};

template <class T>
inline TileTerms tile_terms(const Problem& p, TileKind kind, Range keys) {
  const MaskUse use = mask_use(p);
  const bool ragged = count(keys) % kLanes<T> != 0;
  return {p.softcap > 0, use.additive, kind != TileKind::full || p.attn_mask.data || ragged};
}

// Whether a boolean mask excludes the whole tile, so that nothing of it need be computed.
inline bool excluded(const Problem& p, const RowTile& tile, Range keys) {
  const TensorView& mask = p.attn_mask;
  if (!mask_use(p).boolean || p.masked_score != -__builtin_inf()) return false;
  const int64_t heads = mask.head_stride ? tile.heads : 1, rows = mask.row_stride ? count(tile.rows) : 1;
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < rows; ++i) {
      const uint8_t* allowed = at<const uint8_t>(p, mask, tile.batch, tile.first_head + h) +
                               (tile.rows.begin + i) * mask.row_stride + keys.begin * mask.col_stride;
      uint8_t any = 0;
      for (int64_t k = 0; k < count(keys); ++k) any |= allowed[k * mask.col_stride];
      if (any) return false;
    }
  return true;
}

// Fills `scratch` for row r of the tile.
template <class T>
inline void load_terms(const Problem& p, const RowTile& tile, int64_t r, Range keys, const TileTerms& terms,
                       const RowScratch<T>& scratch) {
  if (!terms.states && !terms.additive) return;
  row_terms<T>(p, tile.batch, head_of(tile, r), row_of(tile, r), keys, scratch.additive, scratch.state);
  for (int64_t k = count(keys); k % kLanes<T> != 0; ++k) {
    scratch.state[k] = kMasked;
    scratch.additive[k] = T(0);
  }
}

// The score of kLanes keys from their dot products; *slope is d score / d (scale * dot product).
template <class T>
SCALEDOT_INLINE Vec<T> score(const Problem& p, const TileTerms& terms, const RowScratch<T>& scratch, int64_t k,
                             Vec<T> dot, Vec<T>* slope) {
  Vec<T> s = dot * Vec<T>(T(p.scale));
  if (slope) *slope = Vec<T>(T(1));
  if (terms.softcap) {
    s = capped(s, T(p.softcap));
    if (slope) *slope = capped_slope(s, T(p.softcap));
  }
  if (terms.additive) s = s + load(scratch.additive + k);
  if (terms.states) {
    s = select(bytes_equal<T>(scratch.state + k, kReplaced), Vec<T>(T(p.masked_score)), s);
    s = select(bytes_equal<T>(scratch.state + k, kMasked), Vec<T>(-T(__builtin_inf())), s);
  }
  return s;
}

// Dot products to scores in place; returns the row's maximum.
template <class T>
inline T finish_scores(const Problem& p, const TileTerms& terms, const RowScratch<T>& scratch, int64_t keys, T* row) {
  Vec<T> maximum_score(-T(__builtin_inf()));
  for (int64_t k = 0; k < keys; k += kLanes<T>) {
    const Vec<T> s = score<T>(p, terms, scratch, k, load(row + k), nullptr);
    maximum_score = maximum(s, maximum_score);
    store(row + k, s);
  }
  return maximum_of(maximum_score);
}

// exp(s - offset - log_sum) of kLanes scores. The first difference is exact near the maximum, however large the scores are (a
// masked_score of -1e9, a bias of the lowest float).
template <class T>
SCALEDOT_INLINE Vec<T> weight(Vec<T> s, Vec<T> offset, Vec<T> log_sum) {
  return exp((s - offset) - log_sum);
}

// kSkip in place of what belongs to masked keys.
template <class T>
SCALEDOT_INLINE Vec<T> without_masked(const TileTerms& terms, const RowScratch<T>& scratch, int64_t k, Vec<T> x) {
  return terms.states ? select(bytes_equal<T>(scratch.state + k, kMasked), Vec<T>(kSkip<T>), x) : x;
}

// Scores to exp(s - offset) in place; returns their sum.
template <class T>
inline T exponentiate(const TileTerms& terms, const RowScratch<T>& scratch, T offset, int64_t keys, T* row) {
  Vec<T> sum(T(0));
  for (int64_t k = 0; k < keys; k += kLanes<T>) {
    const Vec<T> w = without_masked(terms, scratch, k, weight(load(row + k), Vec<T>(offset), Vec<T>(T(0))));
    sum = sum + w;
    store(row + k, w);
  }
  return sum_of(sum);
}

// Raises a row's maximum to `highest`, and rescales what was summed under the old one: its sum and `output`.
template <class T>
inline void raise_maximum(RowState<T>& state, T highest, T* output, int64_t width) {
  if (!(highest > state.maximum)) return;
  if (state.sum != T(0)) {
    const T factor = exp(state.maximum - highest);
    state.sum *= factor;
    for (int64_t d = 0; d < width; d += kLanes<T>) store(output + d, load(output + d) * Vec<T>(factor));
  }
  state.maximum = highest;
}

template <class T>
inline void load_keep(const Problem& p, const RowTile& tile, int64_t r, Range keys, const RowScratch<T>& scratch) {
  const DropoutRow stream = dropout_row(p, tile.batch, head_of(tile, r), row_of(tile, r));
  for (int64_t k = 0; k < count(keys); k += kDropoutGroup)
    dropout_keep_group(stream, (keys.begin + k) / kDropoutGroup, scratch.keep + k);
}

// Sets dropped weights to 0, of their own sign so that kSkip stays kSkip; the factor 1 / (1 - dropout_p) is left to the
// caller, who has a row sum to divide by anyway.
template <class T>
inline void drop(const RowScratch<T>& scratch, int64_t keys, T* row) {
  for (int64_t k = 0; k < keys; k += kLanes<T>)
    store(row + k, select(bytes_equal<T>(scratch.keep + k, 1), load(row + k), load(row + k) * Vec<T>(T(0))));
}

// Weights times `factor`, in place; kSkip becomes 0 even if the factor is NaN.
template <class T>
inline void normalise(T factor, int64_t keys, T* row) {
  for (int64_t k = 0; k < keys; k += kLanes<T>)
    store(row + k, select(skipped(load(row + k)), Vec<T>(T(0)), load(row + k) * Vec<T>(factor)));
}

}  // namespace
}  // namespace scaledot
