// Index arithmetic of the backward for sm_90: which tiles of rows a tile of keys visits and in which order blocks add
// to grad_query, which scores are live, and which elements a thread holds.
#pragma once

#include "cuda/sm90/backward_config.h"

namespace scaledot {

// Tile sizes of the kernel for this problem.
inline Sm90BackwardTileSizes backward_tile_sizes(const Problem& p) {
  return with_padded_dims(
      p, [](auto dim, auto value_dim) { return sm90_backward_tile_sizes(dim.value, value_dim.value); });
}

SCALEDOT_FN Range backward_rows(const Problem& p, int64_t tile, int rows) {
  return {tile * rows, min((tile + 1) * rows, p.query_length)};
}
SCALEDOT_FN Range backward_keys(const Problem& p, int64_t tile, int keys) {
  return {tile * keys, min((tile + 1) * keys, p.key_length)};
}

// The tiles of `rows` rows that may attend to any of these keys by position (tile_kind is not skip). Both ends of
// row_keys never decrease, so the tiles are neighbours, and either end is found by bisection.
SCALEDOT_FN Range backward_row_tiles(const Problem& p, Range keys, int rows) {
  const int64_t tiles = ceil_div(p.query_length, rows);
  Range result = {0, tiles};
  for (int64_t high = tiles; result.begin < high;) {
    const int64_t middle = (result.begin + high) / 2;
    if (row_keys(p, backward_rows(p, middle, rows).end - 1).end > keys.begin)
      high = middle;
    else
      result.begin = middle + 1;
  }
  for (int64_t low = result.begin; low < result.end;) {
    const int64_t middle = (low + result.end) / 2;
    if (row_keys(p, backward_rows(p, middle, rows).begin).begin >= keys.end)
      result.end = middle;
    else
      low = middle + 1;
  }
  return result;
}

// Tiles of keys take turns from the last one to the first: turn 0 is the last tile's. Under a causal mask the last keys
// have the fewest rows, so a tile comes to its rows when the tiles before it have left them.
SCALEDOT_FN int backward_turn(int64_t key_tiles, int64_t tile) { return int(key_tiles - 1 - tile); }

// The turn of the first tile of `keys` keys that adds to a row tile's grad_query. The others follow one by one.
SCALEDOT_FN int backward_first_turn(const Problem& p, Range rows, int keys) {
  const int64_t end = min(row_keys(p, rows.end - 1).end, p.key_length);
  return backward_turn(ceil_div(p.key_length, keys), max<int64_t>(end - 1, 0) / keys);
}

// ---------------------------------------------------------------------------------------------------- live scores
// Sm90BackwardConfig::kGeneral.
inline bool needs_general_backward(const Problem& p) {
  return p.softcap > 0 || p.dropout_p > 0 || p.attn_mask.data || p.alibi_slopes.data;
}

// For row tile 0 of `rows` rows; further down both bounds grow by the first row.
SCALEDOT_FN LiveBand backward_band(const Problem& p, Range keys, int rows) {
  constexpr int64_t kFar = 1 << 30;  // at least any length
  const int64_t shift = p.position.diagonal - keys.begin;
  const int64_t low = shift - p.position.window_left, high = shift + p.position.window_right;
  return {int(max(min(low, kFar), -kFar)), int(max(min(high, kFar), -kFar)), rows, int(keys.end - keys.begin)};
}
SCALEDOT_FN LiveBand band_of_rows(const LiveBand& b, int first_row, int rows) {
  return {b.low + first_row, b.high + first_row, rows, b.keys};
}
// Whether all scores of a tile of `rows` rows and `keys` keys are live.
SCALEDOT_FN bool band_is_whole(const LiveBand& b, int rows, int keys) {
  return b.rows == rows && b.keys == keys && b.low <= 1 - b.rows && b.high >= b.keys - 1;
}
SCALEDOT_FN bool in_band(const LiveBand& b, int row, int key) {
  return key - row >= b.low && key - row <= b.high && row < b.rows && key < b.keys;
}

// ---------------------------------------------------------------------------------------------------- threads
// The scores of a thread in a tile: two keys, 8 apart, and two neighbouring rows of every 8 rows of its warpgroup.
struct Sm90BackwardLayout {
  int first_key, first_row;  // of the warpgroup, in this part of the rows
  int warp, group, quad;     // key 16 warp + group, rows 2 quad

  SCALEDOT_HOST_DEVICE constexpr int key(int half) const { return first_key + 16 * warp + group + 8 * half; }
  SCALEDOT_HOST_DEVICE constexpr int row(int n, int j) const { return first_row + 8 * n + 2 * quad + j; }
};
template <class C>
SCALEDOT_FN Sm90BackwardLayout backward_layout_of(int thread, int warpgroup, int row_part) {
  return {C::kWide ? 0 : 64 * warpgroup, C::kScoreRows * (C::kWide ? warpgroup : row_part), thread / 32 % 4,
          thread % 32 / 4, thread % 4};
}

// The place of a row in Sm90TileStatistics for plain scores. The rows of one thread, among every 16, are side by side.
SCALEDOT_FN int statistics_place(int row) { return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2; }

// Where the sums of grad_query of one row tile and warpgroup (64 rows x kGradQueryCols) are in global memory: one part
// after the other, four sums of a thread side by side. Element e of `thread` in 8-column group `group` is at:
struct GradQueryPosition {
  int row, col;
};
SCALEDOT_FN GradQueryPosition grad_query_position(int thread, int group, int e) {
  return {thread / 32 * 16 + thread % 32 / 4 + e / 2 * 8, group * 8 + thread % 4 * 2 + e % 2};
}

}  // namespace scaledot
