// How the backward for sm_90 cuts a problem up: tiles, shared memory, and who adds to grad_query when.
//
// A block makes grad_key and grad_value of kKeys keys. Two warpgroups go through the tiles of kRows rows that attend to
// any of the keys; each makes the scores of 64 of the keys and kScoreRows of the rows. A third warpgroup loads tiles,
// and adds to grad_query in global memory.
#pragma once

#include "cuda/sm90/config.h"

namespace scaledot {

constexpr int kBackwardRows = 64;
constexpr int kNarrowDim = 128;  // of the most columns of which a warpgroup has room for all sums of its keys

// kDim: columns of queries, keys and values, padded with zeros. kGeneral: scores are more than products that a range of keys
// leaves; dropout.
template <class Storage_, int kDim_, bool kGeneral_>
struct BackwardConfig {
  using Storage = Storage_;
  static constexpr int kDim = kDim_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr bool kWide = kDim > kNarrowDim;
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // Narrow: a warpgroup has 64 keys of its own, and all rows. Wide: both have the same keys, and half of the rows.
  static constexpr int kRows = kBackwardRows, kKeys = kWide ? 64 : 128;
  static constexpr int kScoreRows = kWide ? kRows / kConsumers : kRows;
  static constexpr int kScores = kScoreRows / 2;  // that a thread has
  // Tiles of rows in shared memory. Wide: grad_output is done with first, and needed again last.
  static constexpr int kQueryStages = 2, kGradStages = kWide ? 1 : 2;
  static constexpr int kPanels = kDim / kPanelCols;
  // Columns of grad_query that a warpgroup makes, and in how many parts, for which there is room one after the other.
  static constexpr int kShare = kDim / kConsumers, kParts = kWide ? 2 : 1, kPartCols = kShare / kParts;
  // Registers of a thread; 65536 in all.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  // A block starts with the same number for all, and deals out no more than those.
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * (kConsumers + 1));
};

// What is known of a row beside its query; an array of them is padded to whole tiles.
struct alignas(16) RowTerms {
  float lse2;    // lse in units of log 2: P = 2^(score / log 2 - lse2)
  float delta;   // dS = P (dP - delta)
  float offset;  // P = exp(score - offset - log_sum), where the score is large: RowShift in generic/backward.cuh
  float log_sum;
};
struct alignas(16) RowPosition {
  int32_t live_begin, live_end;  // keys that it attends to by position
  int32_t aligned;
  float slope;
  int64_t mask_start, grad_mask_start;  // of the row in attn_mask and in grad_mask, in elements
};

// Whether all positions of the problem can be told by j - i alone.
SCALEDOT_FN bool positions_are_a_band(const Problem& p) { return p.position.pattern == kNoPattern; }

// Which scores of a tile are masked by position or lie outside of the problem: element (row, key) is live if
// low <= key - row <= high, row < rows and key < keys.
struct Band {
  int low, high, rows, keys;
};
// For the tile of rows 0; further down both bounds grow by the first row.
SCALEDOT_FN Band backward_band(const Problem& p, Range keys) {
  constexpr int64_t kFar = 1 << 30;  // lengths are less
  const int64_t shift = p.position.diagonal - keys.begin;
  const int64_t low = shift - p.position.window_left, high = shift + p.position.window_right;
  return {int(max(min(low, kFar), -kFar)), int(max(min(high, kFar), -kFar)), kBackwardRows,
          int(keys.end - keys.begin)};
}
SCALEDOT_FN Band band_of_rows(const Band& b, int first_row, int rows) {
  return {b.low + first_row, b.high + first_row, rows, b.keys};
}
// `keys`: of a whole tile.
SCALEDOT_FN bool band_is_whole(const Band& b, int keys) {
  return b.rows == kBackwardRows && b.keys == keys && b.low <= 1 - b.rows && b.high >= b.keys - 1;
}
SCALEDOT_FN bool in_band(const Band& b, int row, int key) {
  return key - row >= b.low && key - row <= b.high && row < b.rows && key < b.keys;
}

// Where the scores of a thread stand in a tile: it has two keys, 8 apart, and in every 8 rows of its warpgroup two
// neighbours.
struct KeyLane {
  int first_key, first_row;  // of the warpgroup
  int warp, group, quad;     // key 16 warp + group, rows 2 quad

  SCALEDOT_HOST_DEVICE constexpr int key(int half) const { return first_key + 16 * warp + group + 8 * half; }
  SCALEDOT_HOST_DEVICE constexpr int row(int n, int j) const { return first_row + 8 * n + 2 * quad + j; }
};
template <class C>
SCALEDOT_FN KeyLane key_lane_of(int thread, int warpgroup) {
  return {C::kWide ? 0 : 64 * warpgroup, C::kWide ? C::kScoreRows * warpgroup : 0, thread / 32 % 4, thread % 32 / 4,
          thread % 4};
}

// What one block computes: a tile of keys, for all tiles of rows of all query heads that share them.
struct BackwardTask {
  int batch, kv_head, tile;
  int first_row_tile, end_row_tile;
  int first_head, end_head;
  Band band;  // at tile of rows 0
};

template <class C>
struct alignas(1024) BackwardShared90 {
  typename C::Storage key[C::kKeys * C::kDim];
  typename C::Storage value[C::kKeys * C::kDim];
  typename C::Storage query[C::kQueryStages][C::kRows * C::kDim];
  typename C::Storage grad_output[C::kGradStages][C::kRows * C::kDim];
  // A row of 128 bytes for every key, swizzled. Narrow: dX^T of this tile of rows and of the last one. Wide: Pd^T and
  // dX^T.
  typename C::Storage scores[2][C::kKeys * C::kRows];
  float grad_query[C::kConsumers][C::kRows * C::kPartCols];
  RowTerms terms[C::kQueryStages][C::kRows];
  RowPosition positions[C::kGeneral ? C::kQueryStages : 1][C::kGeneral ? C::kRows : 1];
  uint8_t kept[C::kGeneral ? C::kConsumers : 1][C::kGeneral ? C::kRows * 16 : 16];
  uint64_t query_full[C::kQueryStages], query_empty[C::kQueryStages];  // with terms and positions
  uint64_t grad_full[C::kGradStages], grad_empty[C::kGradStages], loaded;
  BackwardTask task;
};

// Keys of a tile, of the kernel for this problem.
inline int backward_tile_keys(const Problem& p) {
  return with_padded_dim(p, [](auto dim) { return BackwardConfig<BFloat16, dim.value, false>::kKeys; });
}

SCALEDOT_FN Range backward_rows(const Problem& p, int64_t tile) {
  return {tile * kBackwardRows, min((tile + 1) * kBackwardRows, p.query_length)};
}
SCALEDOT_FN Range backward_keys(const Problem& p, int64_t tile, int keys) {
  return {tile * keys, min((tile + 1) * keys, p.key_length)};
}

// The tiles of rows that attend to any of these keys by position: those whose tile_kind is not skip. Both ends of row_keys never
// decrease, so they are neighbours, and either end is found by bisection.
SCALEDOT_FN Range backward_row_tiles(const Problem& p, Range keys) {
  const int64_t tiles = ceil_div(p.query_length, kBackwardRows);
  Range result = {0, tiles};
  for (int64_t high = tiles; result.begin < high;) {
    const int64_t middle = (result.begin + high) / 2;
    if (row_keys(p, backward_rows(p, middle).end - 1).end > keys.begin)
      high = middle;
    else
      result.begin = middle + 1;
  }
  for (int64_t low = result.begin; low < result.end;) {
    const int64_t middle = (low + result.end) / 2;
    if (row_keys(p, backward_rows(p, middle).begin).begin >= keys.end)
      result.end = middle;
    else
      low = middle + 1;
  }
  return result;
}

// Sums of grad_query are taken in the order of the keys: the first tile of `keys` keys that adds to a tile of rows.
SCALEDOT_FN int64_t backward_first_keys(const Problem& p, int64_t row_tile, int keys) {
  return row_keys(p, backward_rows(p, row_tile).begin).begin / keys;
}

// Element (row, col) of a tile of rows' grad_query among a warpgroup's kRows x kShare sums, as they are added up in
// global memory, one part after the other: four sums of a thread lie side by side. Number `e` of thread `thread` is sum
// e of its group of columns `group`.
struct SumPlace {
  int row, col;
};
SCALEDOT_FN SumPlace backward_sum_place(int thread, int group, int e) {
  return {thread / 32 * 16 + thread % 32 / 4 + e / 2 * 8, group * 8 + thread % 4 * 2 + e % 2};
}

}  // namespace scaledot
