// The forward's tasks and its scratch memory.
#pragma once

#include "core/arena.h"
#include "core/dispatch.h"
#include "core/saved.h"
#include "cpu/simd/attention/partial_sums.h"

namespace scaledot {
namespace {

// Sizes of the packed keys and values of one KV group, in operands.
template <class Operand>
struct HeadPanelSizes {
  int64_t key_tile;    // K^T of kTileKeys keys: panels of key columns, head_dim deep
  int64_t value_tile;  // V of kTileKeys keys: panels of value columns, kTileKeys deep
  int64_t tiles;

  explicit HeadPanelSizes(const Problem& p)
      : key_tile(kTileKeys * depth_of<Operand>(p.head_dim)),
        value_tile(depth_of<Operand>(kTileKeys) * padded<SumOf<Operand>>(p.value_dim)),
        tiles(ceil_div(p.key_length, kTileKeys)) {}

  int64_t bytes() const { return tiles * (key_tile + value_tile) * int64_t(sizeof(Operand)); }
};

template <class Operand>
struct ForwardScratch {
  using Sum = SumOf<Operand>;
  ElementOf<Operand>* staging;  // a square of rows before they become operands
  BFloat16* widened;            // (kTileKeys, the larger width padded): quantised rows before that
  Operand* query;               // rows
  Sum* scores;                  // (kTileRows, kRowStride<Sum>)
  Operand* weights;             // P, rows; the scores themselves if operands are single elements
  Sum* output;                  // (kTileRows, value_dim padded)
  SoftmaxRows<Sum> softmax;
  RowTerms<Sum> terms;
  // Weights of every key tile, not normalised yet. nullptr: not returned, or beyond kWeightTilesBudget.
  Sum* weight_tiles;    // (key tile, kShortTileRows, kRowStride<Sum>)
  Sum* pending_max;     // (key tile, kShortTileRows): the lazy maximum that P was computed with
  Range* pending_keys;  // (key tile)
  Sum* mean;            // (rows of a tile, mean_stride): weights summed over the heads
  // Maxima and keys of the saved softmax (save_softmax.h).
  Sum* saved_max;
  Range* saved_keys;  // whole vectors
};

// Rows of operands of `cols` elements each, in blocks of kTileRows rows as multiply() reads them.
template <class Operand>
Operand* take_rows(Arena& arena, int64_t cols) {
  return take<Operand>(
      arena, ceil_div(depth_of<Operand>(cols), int64_t(kBlockDepth<Operand>)) * kTileRows * kRowStride<Operand>);
}

template <class Sum>
int64_t mean_stride(const Problem& p) {
  return round_up(p.key_length, int64_t(kLanes<Sum>));
}

template <class Operand>
ForwardScratch<Operand> lay_out_forward(const Problem& p, Arena& arena) {
  using Sum = SumOf<Operand>;
  ForwardScratch<Operand> s;
  s.staging = take<ElementOf<Operand>>(arena, kLanes<Sum> * padded<Sum>(max(p.head_dim, p.value_dim)));
  const int64_t quantised = is_quantised(p) ? kTileKeys * padded<Sum>(max(p.head_dim, p.value_dim)) : 0;
  s.widened = take<BFloat16>(arena, quantised);
  s.query = take_rows<Operand>(arena, p.head_dim);
  s.scores = take<Sum>(arena, kTileRows * kRowStride<Sum>);
  if constexpr (kHasBf16Pairs<Operand>)
    s.weights = take_rows<Operand>(arena, kTileKeys);
  else
    s.weights = s.scores;
  s.output = take<Sum>(arena, kTileRows * padded<Sum>(p.value_dim));
  s.softmax = lay_out_softmax<Sum>(arena, kTileRows);
  s.terms = lay_out_row<Sum>(p, arena);
  const int64_t tiles = p.weights.data ? ceil_div(p.key_length, kTileKeys) : 0;
  const int64_t size = tiles * kShortTileRows * kRowStride<Sum>;
  s.weight_tiles = nullptr;
  if (0 < size && size * int64_t(sizeof(Sum)) <= kWeightTilesBudget && !p.row_invariant) {
    s.weight_tiles = take<Sum>(arena, size);
    s.pending_max = take<Sum>(arena, tiles * kShortTileRows);
    s.pending_keys = take<Range>(arena, tiles);
  }
  const int64_t saved_tiles = saves_softmax(p) ? ceil_div(p.saved_keys, kTileKeys) : 0;
  s.saved_max = take<Sum>(arena, saved_tiles * kTileRows);
  s.saved_keys = take<Range>(arena, saved_tiles);
  s.mean = averages_weights(p) ? take<Sum>(arena, min<int64_t>(kShortTileRows, p.query_length) * mean_stride<Sum>(p))
                               : nullptr;
  return s;
}

template <class Operand>
struct ForwardPlan {
  HeadPanelSizes<Operand> head;
  bool group_tasks = false;      // a task packs keys of a KV group and attends to them at once
  int64_t group_parts = 1;       // tasks of a KV group, each with a part of its query tiles
  bool average_tasks = false;    // a task is a tile of rows, of all heads of a batch entry
  int64_t slots = 0;             // room for this many times slot_tiles packed tiles of keys and values
  int64_t slot_tiles = 0;        // those of a KV group, or one
  int64_t chunks = 0;            // the key tiles of a KV group are processed in this many chunks, one after the other
  Operand* keys = nullptr;       // (slot, tile)
  Operand* values = nullptr;     // (slot, tile)
  bool* value_finite = nullptr;  // (slot, tile)
  // m, l and O, between chunks (of the KV group of each slot) or of splits (of all KV groups). No rows: not needed.
  PartialSums<SumOf<Operand>> partial = {};
  char* scratch = nullptr;  // of worker 0
  int64_t scratch_bytes = 0;
  int64_t workers = 0;
  QueryTiling tiling = {};
};

template <class Operand>
int64_t key_chunks(const Problem& p, const HeadPanelSizes<Operand>& head) {
  if (p.weights.data || saves_softmax(p) || p.query_length <= kFewTiles * kTileRows) return 1;
  // A window with a left side: a query tile reads few of the keys, and its neighbours read the same ones.
  if (row_keys(p, p.query_length - 1).begin > 0) return 1;
  return max<int64_t>(min(ceil_div(head.bytes(), kSharedCache), head.tiles), 1);
}

// The number of splits of the keys of a KV group with few rows; 0: there are many rows, or all panels of a KV group are
// needed, for returned weights or a saved softmax.
inline int64_t streamed_splits(const Problem& p) {
  if (p.heads / p.kv_heads * p.query_length > kFewRows || p.weights.data || saves_softmax(p)) return 0;
  if (p.row_invariant || may_save_softmax(p)) return 1;
  const int64_t kv_groups = max<int64_t>(p.batch * p.kv_heads, 1);
  return max<int64_t>(min(kFewRowsTasks / kv_groups, p.key_length / kSplitKeys), 1);
}

// Into how many tasks a KV group is cut, so that the last round of tasks leaves few workers idle. Each of them packs
// the keys: the cost of a task is its share of the query tiles, and that of packing.
inline int64_t group_parts(int64_t kv_groups, int64_t workers, int64_t query_tiles) {
  const auto cost = [&](int64_t parts) {
    return double(ceil_div(kv_groups * parts, workers)) * (1 / double(parts) + kPackShare);
  };
  int64_t best = 1;
  for (int64_t parts = 2; parts <= query_tiles; ++parts)
    if (cost(parts) < cost(best)) best = parts;
  return best;
}

template <class Operand>
ForwardPlan<Operand> plan_forward(const Problem& p, int workers, Arena& arena) {
  using Sum = SumOf<Operand>;
  const HeadPanelSizes<Operand> head(p);
  ForwardPlan<Operand> plan = {head};
  plan.average_tasks = averages_weights(p);
  plan.slot_tiles = head.tiles;
  plan.workers = workers;
  const int64_t kv_groups = p.batch * p.kv_heads, bytes = head.bytes();
  const int64_t budget = max(kPackBudget, workers * kPackBudgetPerWorker);
  const int64_t splits = streamed_splits(p);
  const bool streams = splits > 1 || (splits == 1 && kv_groups >= workers);
  plan.group_tasks = streams || (kv_groups >= kManyHeads && bytes <= kSmallHeadBytes && !plan.average_tasks);
  plan.tiling = streams ? even_tiling(p, kTileRows) : forward_tiling(p, workers);
  if (streams) {
    plan.slots = workers;
    plan.slot_tiles = min<int64_t>(head.tiles, 1);
    plan.chunks = head.tiles;
    plan.partial = lay_out_partial_sums<Sum>(p, kv_groups, splits, arena);
  } else {
    plan.chunks = key_chunks(p, head);
    if (plan.group_tasks) {
      if (plan.tiling.micro_tiles > 0) plan.tiling = even_tiling(p);  // parts of a KV group take equally long
      plan.group_parts = group_parts(kv_groups, workers, tiles_per_head(plan.tiling));
    }
    plan.slots = plan.group_tasks ? workers : max<int64_t>(min(budget / max<int64_t>(bytes, 1), kv_groups), 1);
    if (plan.chunks > 1) {
      const int64_t state = p.heads / p.kv_heads * p.query_length * padded<Sum>(p.value_dim) * int64_t(sizeof(Sum));
      plan.slots = max<int64_t>(min(plan.slots, budget / (state + 1)), 1);
    }
    if (plan.average_tasks) plan.slots = max<int64_t>(plan.slots / p.kv_heads, 1) * p.kv_heads;
    plan.partial = lay_out_partial_sums<Sum>(p, plan.chunks > 1 ? plan.slots : 0, 1, arena);
  }
  plan.keys = take<Operand>(arena, plan.slots * plan.slot_tiles * head.key_tile);
  plan.values = take<Operand>(arena, plan.slots * plan.slot_tiles * head.value_tile);
  plan.value_finite = take<bool>(arena, plan.slots * plan.slot_tiles);
  plan.scratch = take<char>(arena, 0);
  const int64_t start = arena.used;
  lay_out_forward<Operand>(p, arena);
  plan.scratch_bytes = arena.used - start;
  arena.used = start + workers * plan.scratch_bytes;
  return plan;
}

}  // namespace
}  // namespace scaledot
