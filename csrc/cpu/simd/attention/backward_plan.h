// The backward's tasks and its scratch memory (backward.h).
#pragma once

#include "cpu/simd/attention/forward_plan.h"
#include "cpu/simd/attention/mask_gradient.h"
#include "cpu/simd/attention/relative_gradient.h"

namespace scaledot {
namespace {

// Memory of a group of kElements rows, whose elements make one row of operands when they are read as columns.
template <class E>
struct GroupTerms {
  using T = SumOf<E>;
  RowTerms<T> row[kElements<E>];
  // (kElements, kTileKeys) each:
  T* slopes;        // d score / d (scale * dot product)
  T* grad_weights;  // dW
  T* grad_scores;   // dS
};

template <class E>
struct BackwardScratch {
  using T = SumOf<E>;
  ElementOf<E>* staging;  // a square of rows before they become operands
  // Of the key tile.
  PackedPanels<E> key_columns;    // K^T
  PackedPanels<E> value_columns;  // V^T
  PackedPanels<E> keys;           // K
  T* grad_key;                    // (kTileKeys, head_dim padded)
  T* grad_value;                  // (kTileKeys, value_dim padded)
  T* grad_key_part;               // partial sums of kQueryTilesPerPartialSum query tiles; nullptr: not needed
  T* grad_value_part;
  // Of the query tile.
  E* query;        // rows
  E* grad_output;  // rows
  PackedPanels<E> queries;
  PackedPanels<E> grad_outputs;
  T* grad_query;       // (kTileRows, head_dim padded)
  T* grad_query_part;  // the same, of one split; only if dQ is computed apart
  SplitLse<T>* shift;
  T* delta;
  bool* whole;  // all keys of the row are in one tile: its sum and delta are computed from the tile of scores
  bool finite;  // every input of the gradients of these scores is finite
  // Of the tile of scores. If operands are single elements, these share two arrays.
  T* scores;        // (kTileRows, kRowStride<T>): S
  T* grads;         // the same: dP
  E* weights;       // Pd, Layout::columns
  E* grad_columns;  // dX, Layout::columns
  E* grad_rows;     // dX, Layout::rows
  GroupTerms<E> group;
  T* diagonals;  // (kTileDiagonals): dS summed along them
};

template <class E>
PackedPanels<E> take_panels(Arena& arena, int64_t depth, int64_t cols) {
  return {take<E>(arena, round_up(cols, int64_t(kPanel<E>)) * depth), depth * kPanel<E>, true};
}

template <class E>
BackwardScratch<E> lay_out_backward(const Problem& p, Arena& arena) {
  using T = SumOf<E>;
  BackwardScratch<E> s;
  s.staging = take<ElementOf<E>>(arena, kLanes<T> * padded<T>(max(p.head_dim, p.value_dim)));
  s.key_columns = take_panels<E>(arena, depth_of<E>(p.head_dim), kTileKeys);
  s.value_columns = take_panels<E>(arena, depth_of<E>(p.value_dim), kTileKeys);
  s.keys = take_panels<E>(arena, depth_of<E>(kTileKeys), p.head_dim);
  s.grad_key = take<T>(arena, kTileKeys * padded<T>(p.head_dim));
  s.grad_value = take<T>(arena, kTileKeys * padded<T>(p.value_dim));
  const bool parts = tiles_per_head(backward_tiling(p)) > kQueryTilesPerPartialSum;
  s.grad_key_part = parts ? take<T>(arena, kTileKeys * padded<T>(p.head_dim)) : nullptr;
  s.grad_value_part = parts ? take<T>(arena, kTileKeys * padded<T>(p.value_dim)) : nullptr;
  s.query = take_rows<E>(arena, p.head_dim);
  s.grad_output = take_rows<E>(arena, p.value_dim);
  s.queries = take_panels<E>(arena, depth_of<E>(kTileRows), p.head_dim);
  s.grad_outputs = take_panels<E>(arena, depth_of<E>(kTileRows), p.value_dim);
  s.grad_query = take<T>(arena, kTileRows * padded<T>(p.head_dim));
  s.grad_query_part = take<T>(arena, kTileRows * padded<T>(p.head_dim));
  s.shift = take<SplitLse<T>>(arena, kTileRows);
  s.delta = take<T>(arena, kTileRows);
  s.whole = take<bool>(arena, kTileRows);
  s.scores = take<T>(arena, kTileRows * kRowStride<T>);
  s.grads = take<T>(arena, kTileRows * kRowStride<T>);
  if constexpr (!kHasPairs<E>) {
    static_assert(kRowStride<E> == kColumnStride<E>);
    s.weights = s.scores;
    s.grad_columns = s.grad_rows = s.grads;
  } else {
    s.weights = take<E>(arena, depth_of<E>(kTileRows) * kColumnStride<E>);
    s.grad_columns = take<E>(arena, depth_of<E>(kTileRows) * kColumnStride<E>);
    s.grad_rows = take_rows<E>(arena, kTileKeys);
  }
  for (RowTerms<T>& row : s.group.row) row = lay_out_row<T>(arena);
  s.group.slopes = take<T>(arena, kTileKeys * kElements<E>);
  s.group.grad_weights = take<T>(arena, kTileKeys * kElements<E>);
  s.group.grad_scores = take<T>(arena, kTileKeys * kElements<E>);
  s.diagonals = take<T>(arena, kTileDiagonals);
  return s;
}

// Whether P of the whole key tile that has these keys is kept. Of the keys alone, it would depend on the query tile
// that meets them, and so on the number of threads.
inline bool saves_tile(const Problem& p, Range keys) {
  return saves_softmax(p) && min(round_up(keys.end, int64_t(kTileKeys)), p.key_length) <= p.saved_keys;
}

// What a (batch, kv head) pair is split along, so that there are enough tasks.
enum class SplitAlong {
  keys,  // a split is neighbouring key tiles; with several splits, each has a partial sum of dQ
  rows   // a split is every splits-th query tile; each has partial sums of dK and dV
};

template <class E>
struct BackwardPlan {
  using T = SumOf<E>;
  int64_t key_tiles;
  int64_t query_tiles;  // of a pair
  int64_t classes;      // sets of pairs that one task visits in order (see MaskGradient); usually each pair is one
  SplitAlong along;
  int64_t splits;
  int64_t tile;        // elements of dQ in a query tile, rows padded
  bool apart;          // dQ is computed apart from dK and dV
  bool whole_rows;     // there is one key tile: every row is whole, and no row statistics are prepared
  T* delta;            // (batch, heads, query_length); nothing if whole_rows
  SplitLse<T>* shift;  // the same
  // Partial sums of dQ: (pair, split, query tile), or the query tiles of a split for each worker. Nothing if dQ is
  // computed apart or there is one key tile.
  T* grad_query;
  // Partial sums of splits along the rows.
  T* grad_key;    // (pair, split, key_length, head_dim padded)
  T* grad_value;  // (pair, split, key_length, value_dim padded)
  char* scratch;  // of worker 0
  int64_t scratch_bytes;

  bool sums_grad_query() const { return along == SplitAlong::keys && splits > 1; }  // over the splits
  bool sums_grad_key() const { return along == SplitAlong::rows; }                  // and dV
  Range keys_of(int64_t split) const {
    return along == SplitAlong::keys ? Range{key_tiles * split / splits, key_tiles * (split + 1) / splits}
                                     : Range{0, key_tiles};
  }
  // The query tiles of a split. They are dealt round-robin, so that every split gets long and short causal tiles.
  int64_t tiles_of(int64_t split) const {
    return along == SplitAlong::rows ? ceil_div(query_tiles - split, splits) : query_tiles;
  }
  int64_t tile_of(int64_t split, int64_t n) const { return along == SplitAlong::rows ? split + n * splits : n; }
};

// How many splits `tiles` tiles get, if the partial sums of one split take `bytes` bytes: enough for kWantedTasks
// tasks, as far as kSplitBudget allows.
inline int64_t affordable_splits(int64_t classes, int64_t tiles, int64_t bytes) {
  const int64_t wanted = min(ceil_div(kWantedTasks, max<int64_t>(classes, 1)), tiles);
  return max<int64_t>(min(wanted, kSplitBudget / max<int64_t>(bytes, 1)), 1);
}

template <class E>
BackwardPlan<E> plan_backward(const Problem& p, int workers, Arena& arena) {
  using T = SumOf<E>;
  const int64_t pairs = p.batch * p.kv_heads;
  const int64_t key_width = padded<T>(p.head_dim), value_width = padded<T>(p.value_dim);
  const QueryTiling tiling = backward_tiling(p);
  BackwardPlan<E> plan = {};
  plan.key_tiles = ceil_div(p.key_length, kTileKeys);
  plan.query_tiles = tiles_per_head(tiling);
  plan.classes = gradient_classes(p);
  plan.tile = tiling.rows * tiling.heads * key_width;
  // A split of the keys has dQ of all heads that share them; a split of the rows has dK and dV, which may be smaller.
  const int64_t rows = plan.query_tiles * plan.tile, keys = p.key_length * (key_width + value_width);
  const int64_t key_splits = affordable_splits(plan.classes, plan.key_tiles, pairs * rows * int64_t(sizeof(T)));
  const int64_t row_splits =
      affordable_splits(plan.classes, plan.query_tiles / kQueryTilesPerSplit, pairs * keys * int64_t(sizeof(T)));
  const bool along_rows = pairs_are_classes(p) && keys < rows && row_splits > 1;
  plan.along = along_rows ? SplitAlong::rows : SplitAlong::keys;
  plan.splits = along_rows ? row_splits : key_splits;
  plan.apart = plan.classes * plan.splits < workers && count(plan.keys_of(plan.splits - 1)) > 1 && !p.grad_mask.data &&
               !p.grad_relative_bias.data;
  plan.whole_rows = plan.key_tiles == 1 && !p.part.given;
  const int64_t prepared = plan.whole_rows ? 0 : p.batch * p.heads * p.query_length;
  plan.delta = take<T>(arena, prepared);
  plan.shift = take<SplitLse<T>>(arena, prepared);
  const int64_t partial_sums = plan.sums_grad_query() ? pairs * plan.splits : workers;
  plan.grad_query = take<T>(arena, plan.apart || plan.key_tiles == 1 ? 0 : partial_sums * plan.tiles_of(0) * plan.tile);
  const int64_t partial_keys = along_rows ? pairs * plan.splits * p.key_length : 0;
  plan.grad_key = take<T>(arena, partial_keys * key_width);
  plan.grad_value = take<T>(arena, partial_keys * value_width);
  plan.scratch = take<char>(arena, 0);
  const int64_t start = arena.used;
  lay_out_backward<E>(p, arena);
  plan.scratch_bytes = arena.used - start;
  arena.used = start + workers * plan.scratch_bytes;
  return plan;
}

}  // namespace
}  // namespace scaledot
