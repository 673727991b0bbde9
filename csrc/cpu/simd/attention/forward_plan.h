// The forward's tasks and its scratch memory.
#pragma once

#include "core/arena.h"
#include "core/dispatch.h"
#include "core/saved.h"
#include "cpu/simd/attention/softmax.h"

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

// Whether the scores of the next key tile are computed during the softmax of this one.
template <class Operand>
constexpr bool kComputesAhead = kHasTileUnit&& kHasBf16Pairs<Operand>;

template <class Operand>
struct ForwardScratch {
  using Sum = SumOf<Operand>;
  ElementOf<Operand>* staging;  // a square of rows before they become operands
  BFloat16* widened;            // (kTileKeys, the larger width padded): quantised rows before that
  Operand* query;               // rows
  Sum* scores;                  // (kTileRows, kRowStride<Sum>)
  Sum* next_scores;             // the same, of the key tile after; the same memory if that is not computed ahead
  Operand* weights;             // P, rows; the scores themselves if operands are single elements
  Sum* output;                  // (kTileRows, value_dim padded)
  SoftmaxRows<Sum> softmax;
  RowTerms<Sum> terms;
  // P of every key tile, saved until the last maximum is known. nullptr: not saved.
  Sum* saved;           // (key tile, kShortTileRows, kRowStride<Sum>)
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
  s.scores = s.next_scores = take<Sum>(arena, kTileRows * kRowStride<Sum>);
  if constexpr (kComputesAhead<Operand>) s.next_scores = take<Sum>(arena, kTileRows * kRowStride<Sum>);
  if constexpr (kHasBf16Pairs<Operand>)
    s.weights = take_rows<Operand>(arena, kTileKeys);
  else
    s.weights = s.scores;
  s.output = take<Sum>(arena, kTileRows * padded<Sum>(p.value_dim));
  s.softmax = lay_out_softmax<Sum>(arena, kTileRows);
  s.terms = lay_out_row<Sum>(arena);
  const int64_t tiles = p.weights.data ? ceil_div(p.key_length, kTileKeys) : 0;
  const int64_t size = tiles * kShortTileRows * kRowStride<Sum>;
  s.saved = nullptr;
  if (0 < size && size * int64_t(sizeof(Sum)) <= kSavedWeightsBudget) {
    s.saved = take<Sum>(arena, size);
    s.pending_max = take<Sum>(arena, tiles * kShortTileRows);
    s.pending_keys = take<Range>(arena, tiles);
  }
  const int64_t kept_tiles = saves_softmax(p) ? ceil_div(p.saved_keys, kTileKeys) : 0;
  s.saved_max = take<Sum>(arena, kept_tiles * kTileRows);
  s.saved_keys = take<Range>(arena, kept_tiles);
  s.mean = averages_weights(p) ? take<Sum>(arena, min<int64_t>(kShortTileRows, p.query_length) * mean_stride<Sum>(p))
                               : nullptr;
  return s;
}

template <class Operand>
struct ForwardPlan {
  HeadPanelSizes<Operand> head;
  bool head_tasks;     // a task is a KV group: it packs the KV group and attends to it
  bool average_tasks;  // a task is a tile of rows, of all heads of a batch entry
  int64_t slots;       // room for the packed keys and values of this many KV groups
  int64_t chunks;      // the key tiles of a head are processed in this many chunks
  Operand* keys;       // (slot, tile)
  Operand* values;     // (slot, tile)
  bool* value_finite;  // (slot, tile)
  // With several chunks: m, l and O between them.
  SoftmaxRows<SumOf<Operand>> softmax;  // (slot, row of all heads of the KV group)
  SumOf<Operand>* output;               // (slot, row of all heads of the KV group, value_dim padded)
  char* scratch;                        // of worker 0
  int64_t scratch_bytes;
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

template <class Operand>
ForwardPlan<Operand> plan_forward(const Problem& p, int workers, Arena& arena) {
  using Sum = SumOf<Operand>;
  const HeadPanelSizes<Operand> head(p);
  ForwardPlan<Operand> plan = {
      head, false, averages_weights(p), 1, key_chunks(p, head), nullptr, nullptr, nullptr, {}, nullptr, nullptr, 0};
  plan.workers = workers;
  plan.tiling = forward_tiling(p, workers);
  const int64_t kv_groups = p.batch * p.kv_heads, bytes = head.bytes();
  const int64_t budget = max(kPackBudget, workers * kPackBudgetPerWorker);
  plan.head_tasks = kv_groups >= kManyHeads && bytes <= kSmallHeadBytes && !plan.average_tasks;
  plan.slots = plan.head_tasks ? workers : max<int64_t>(min(budget / max<int64_t>(bytes, 1), kv_groups), 1);
  const int64_t rows = plan.chunks > 1 ? p.heads / p.kv_heads * p.query_length : 0, width = padded<Sum>(p.value_dim);
  if (rows > 0) plan.slots = max<int64_t>(min(plan.slots, budget / (rows * width * int64_t(sizeof(Sum)) + 1)), 1);
  if (plan.average_tasks) plan.slots = max<int64_t>(plan.slots / p.kv_heads, 1) * p.kv_heads;
  plan.keys = take<Operand>(arena, plan.slots * head.tiles * head.key_tile);
  plan.values = take<Operand>(arena, plan.slots * head.tiles * head.value_tile);
  plan.value_finite = take<bool>(arena, plan.slots * head.tiles);
  plan.softmax = lay_out_softmax<Sum>(arena, plan.slots * rows);
  plan.output = take<Sum>(arena, plan.slots * rows * width);
  plan.scratch = take<char>(arena, 0);
  const int64_t start = arena.used;
  lay_out_forward<Operand>(p, arena);
  plan.scratch_bytes = arena.used - start;
  arena.used = start + workers * plan.scratch_bytes;
  return plan;
}

}  // namespace
}  // namespace scaledot
