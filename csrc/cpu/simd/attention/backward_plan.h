// The backward's tasks and its scratch memory (backward.h).
#pragma once

#include "cpu/simd/attention/captured_gradient.h"
#include "cpu/simd/attention/forward_plan.h"
#include "cpu/simd/attention/mask_gradient.h"
#include "cpu/simd/attention/relative_gradient.h"

namespace scaledot {
namespace {

// Memory of a group of kElements rows, whose elements make one row of operands when they are read as columns.
template <class Operand>
struct GroupTerms {
  using Sum = SumOf<Operand>;
  RowTerms<Sum> row[kElements<Operand>];
  // (kElements, kTileKeys) each:
  Sum* slopes;        // d score / d (scale * dot product)
  Sum* grad_weights;  // dW
  Sum* grad_scores;   // dS
};

// The backward recomputes a probability as P = exp(score - offset) inverse_sum. Usually offset is lse and inverse_sum
// is 1. Where lse is too large to be precise (SplitLse in core/softmax.h), they are of the maximum and the sum of the
// row.
template <class Sum>
struct RowSoftmax {
  Sum offset;  // a natural logarithm
  Sum inverse_sum;
};

// Sums of a row over the keys of a tile, for shared_key.h.
template <class Sum>
struct RowSums {
  Vec<Sum> operands = Vec<Sum>(Sum(0));  // of dX, before it is rounded to operands
  Vec<Sum> scores = operands;            // of dS, also of replaced scores
  Vec<Sum> slopes = operands;            // of slope P
};

// The mean of some keys of a KV group (shared_key.h).
template <class Sum>
struct SharedKey {
  Sum* mean;  // (head_dim padded), and as much scratch
  bool large;
};

// Whether dX of a row is dS of all its keys.
inline bool score_gradients_are_complete(const Problem& p) { return !has_slopes(p) && !p.part.given; }

// Elements of a tile of dQ while it is summed. With Bf16Pairs the numbers of shared_key.h follow the rows.
template <class Operand>
int64_t grad_query_size(const Problem& p, int64_t rows) {
  using Sum = SumOf<Operand>;
  const int64_t numbers = !kHasBf16Pairs<Operand> ? 0 : score_gradients_are_complete(p) ? 1 : 3;
  return rows * padded<Sum>(p.head_dim) + numbers * padded<Sum>(rows);
}

template <class Operand>
struct BackwardScratch {
  using Sum = SumOf<Operand>;
  ElementOf<Operand>* staging;  // a square of rows before they become operands
  // The key tile.
  Panels<Operand> key_columns;    // K^T
  Panels<Operand> value_columns;  // V^T
  Panels<Operand> keys;           // K
  SharedKey<Sum> shared_key;      // of the KV group
  Sum* grad_key;                  // (kTileKeys, head_dim padded)
  Sum* grad_value;                // (kTileKeys, value_dim padded)
  Sum* grad_key_part;             // partial sums of kQueryTilesPerPartialSum query tiles; nullptr: not needed
  Sum* grad_value_part;
  // The query tile.
  Operand* query;        // rows
  Operand* grad_output;  // rows
  Panels<Operand> queries;
  Panels<Operand> grad_outputs;
  Sum* grad_query;       // (kTileRows, head_dim padded), and what grad_query_size adds
  Sum* grad_query_part;  // the same for one split; only if dQ is computed separately
  RowSoftmax<Sum>* softmax;
  Sum* delta;
  bool* whole;  // all keys of the row are in one tile: its sum and delta are computed from the tile of scores
  bool finite;  // every input of the gradients of these scores is finite
  // The tile of scores. If operands are single elements, these share two arrays.
  Sum* scores;             // (kTileRows, kRowStride<Sum>): S
  Sum* grads;              // the same: dP
  Operand* weights;        // Pd, Layout::columns
  Operand* grad_columns;   // dX, Layout::columns
  Operand* grad_rows;      // dX, Layout::rows
  RowSums<Sum>* row_sums;  // (kTileRows): only for Bf16Pairs, unless score_gradients_are_complete
  GroupTerms<Operand> group;
  Sum* diagonals;  // (kTileDiagonals): dS summed along them
};

template <class Operand>
Panels<Operand> take_panels(Arena& arena, int64_t depth, int64_t cols) {
  return {take<Operand>(arena, round_up(cols, int64_t(kPanel<Operand>)) * depth), depth * kPanel<Operand>, true};
}

template <class Operand>
BackwardScratch<Operand> lay_out_backward(const Problem& p, Arena& arena) {
  using Sum = SumOf<Operand>;
  BackwardScratch<Operand> s;
  s.staging = take<ElementOf<Operand>>(arena, kLanes<Sum> * padded<Sum>(max(p.head_dim, p.value_dim)));
  s.key_columns = take_panels<Operand>(arena, depth_of<Operand>(p.head_dim), kTileKeys);
  s.value_columns = take_panels<Operand>(arena, depth_of<Operand>(p.value_dim), kTileKeys);
  s.keys = take_panels<Operand>(arena, depth_of<Operand>(kTileKeys), p.head_dim);
  s.grad_key = take<Sum>(arena, kTileKeys * padded<Sum>(p.head_dim));
  s.grad_value = take<Sum>(arena, kTileKeys * padded<Sum>(p.value_dim));
  const bool parts = tiles_per_head(backward_tiling(p)) > kQueryTilesPerPartialSum;
  s.grad_key_part = parts ? take<Sum>(arena, kTileKeys * padded<Sum>(p.head_dim)) : nullptr;
  s.grad_value_part = parts ? take<Sum>(arena, kTileKeys * padded<Sum>(p.value_dim)) : nullptr;
  s.query = take_rows<Operand>(arena, p.head_dim);
  s.grad_output = take_rows<Operand>(arena, p.value_dim);
  s.queries = take_panels<Operand>(arena, depth_of<Operand>(kTileRows), p.head_dim);
  s.grad_outputs = take_panels<Operand>(arena, depth_of<Operand>(kTileRows), p.value_dim);
  s.grad_query = take<Sum>(arena, grad_query_size<Operand>(p, kTileRows));
  s.grad_query_part = take<Sum>(arena, grad_query_size<Operand>(p, kTileRows));
  s.softmax = take<RowSoftmax<Sum>>(arena, kTileRows);
  s.delta = take<Sum>(arena, kTileRows);
  s.whole = take<bool>(arena, kTileRows);
  s.scores = take<Sum>(arena, kTileRows * kRowStride<Sum>);
  s.grads = take<Sum>(arena, kTileRows * kRowStride<Sum>);
  if constexpr (!kHasBf16Pairs<Operand>) {
    static_assert(kRowStride<Operand> == kColumnStride<Operand>);
    s.weights = s.scores;
    s.grad_columns = s.grad_rows = s.grads;
  } else {
    s.weights = take<Operand>(arena, depth_of<Operand>(kTileRows) * kColumnStride<Operand>);
    s.grad_columns = take<Operand>(arena, depth_of<Operand>(kTileRows) * kColumnStride<Operand>);
    s.grad_rows = take_rows<Operand>(arena, kTileKeys);
    s.row_sums = take<RowSums<Sum>>(arena, kTileRows);
    s.shared_key = {take<Sum>(arena, 2 * padded<Sum>(p.head_dim)), false};
  }
  for (RowTerms<Sum>& row : s.group.row) row = lay_out_row<Sum>(p, arena);
  s.group.slopes = take<Sum>(arena, kTileKeys * kElements<Operand>);
  s.group.grad_weights = take<Sum>(arena, kTileKeys * kElements<Operand>);
  s.group.grad_scores = take<Sum>(arena, kTileKeys * kElements<Operand>);
  s.diagonals = take<Sum>(arena, kTileDiagonals);
  return s;
}

// Whether P of the whole key tile that has these keys is saved. This is decided for whole key tiles: deciding it for
// the seen keys would depend on the query tile that meets them, and so on the number of threads.
inline bool saves_tile(const Problem& p, Range keys) {
  return saves_softmax(p) && min(round_up(keys.end, int64_t(kTileKeys)), p.key_length) <= p.saved_keys;
}

// The direction in which a KV group is split, so that there are enough tasks.
enum class SplitAlong {
  keys,  // a split is neighbouring key tiles; with several splits, each has a partial sum of dQ
  rows   // a split is every splits-th query tile; each has partial sums of dK and dV
};

template <class Operand>
struct BackwardPlan {
  using Sum = SumOf<Operand>;
  int64_t key_tiles;
  int64_t query_tiles;  // of a KV group
  int64_t classes;  // sets of KV groups that one task visits in order (see MaskGradient); usually each KV group is one
  SplitAlong along;
  int64_t splits;
  int64_t tile;              // grad_query_size of the largest query tile
  bool separate_grad_query;  // dQ is computed separately from dK and dV
  bool whole_rows;           // there is one key tile: every row is whole, and no row statistics are prepared
  Sum* delta;                // (batch, heads, query_length); nothing if whole_rows
  RowSoftmax<Sum>* softmax;  // the same
  // Partial sums of dQ: (KV group, split, query tile), or the query tiles of a split for each worker. Nothing if dQ is
  // computed separately or there is one key tile.
  Sum* grad_query;
  // Partial sums of splits along the rows.
  Sum* grad_key;    // (KV group, split, key_length, head_dim padded)
  Sum* grad_value;  // (KV group, split, key_length, value_dim padded)
  char* scratch;    // of worker 0
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

template <class Operand>
BackwardPlan<Operand> plan_backward(const Problem& p, int workers, Arena& arena) {
  using Sum = SumOf<Operand>;
  const int64_t kv_groups = p.batch * p.kv_heads;
  const int64_t key_width = padded<Sum>(p.head_dim), value_width = padded<Sum>(p.value_dim);
  const QueryTiling tiling = backward_tiling(p);
  BackwardPlan<Operand> plan = {};
  plan.key_tiles = ceil_div(p.key_length, kTileKeys);
  plan.query_tiles = tiles_per_head(tiling);
  plan.classes = class_count(gradient_classes(p));
  plan.tile = grad_query_size<Operand>(p, tiling.rows * tiling.heads);
  // A split of the keys has dQ of all heads that share them; a split of the rows has dK and dV, which may be smaller.
  const int64_t rows = plan.query_tiles * plan.tile, keys = p.key_length * (key_width + value_width);
  const int64_t most = most_captured_splits(p);
  const int64_t key_splits =
      min(affordable_splits(plan.classes, plan.key_tiles, kv_groups * rows * int64_t(sizeof(Sum))), most);
  const int64_t row_splits = min(
      affordable_splits(plan.classes, plan.query_tiles / kQueryTilesPerSplit, kv_groups * keys * int64_t(sizeof(Sum))),
      most);
  const bool along_rows = kv_groups_are_classes(p) && keys < rows && row_splits > 1;
  plan.along = along_rows ? SplitAlong::rows : SplitAlong::keys;
  plan.splits = along_rows ? row_splits : key_splits;
  plan.separate_grad_query = plan.classes * plan.splits < workers && count(plan.keys_of(plan.splits - 1)) > 1 &&
                             !p.grad_mask.data && !p.grad_relative_bias.data && !wants_captured_gradient(p);
  plan.whole_rows = plan.key_tiles == 1 && !p.part.given;
  const int64_t prepared = plan.whole_rows ? 0 : p.batch * p.heads * p.query_length;
  plan.delta = take<Sum>(arena, prepared);
  plan.softmax = take<RowSoftmax<Sum>>(arena, prepared);
  const int64_t partial_sums = plan.sums_grad_query() ? kv_groups * plan.splits : workers;
  plan.grad_query = take<Sum>(
      arena, plan.separate_grad_query || plan.key_tiles == 1 ? 0 : partial_sums * plan.tiles_of(0) * plan.tile);
  const int64_t partial_keys = along_rows ? kv_groups * plan.splits * p.key_length : 0;
  plan.grad_key = take<Sum>(arena, partial_keys * key_width);
  plan.grad_value = take<Sum>(arena, partial_keys * value_width);
  plan.scratch = take<char>(arena, 0);
  const int64_t start = arena.used;
  lay_out_backward<Operand>(p, arena);
  plan.scratch_bytes = arena.used - start;
  arena.used = start + workers * plan.scratch_bytes;
  return plan;
}

}  // namespace
}  // namespace scaledot
