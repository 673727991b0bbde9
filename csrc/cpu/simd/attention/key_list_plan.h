// The tasks and the scratch memory of attention to lists of keys (key_lists.h).
#pragma once

#include "cpu/simd/attention/backward_plan.h"

namespace scaledot {
namespace {

template <class Sum>
struct ListScratch {
  // The lists of a tile's rows, (rows, list_length): keys, sorted by blocks, and where they stand in key_indices.
  int32_t* keys;
  int32_t* columns;
  int64_t* starts;     // (rows, blocks + 1): where each block begins
  int32_t* unsorted;   // (list_length): a list as it is loaded
  int32_t* at_column;  // its columns
  uint32_t* words;     // of dropout, for all columns, in whole groups
  // (row, head) of the tile:
  Sum* query;   // (.., head_dim padded)
  Sum* scores;  // (.., stride): S, then P, in the backward then Pd
  Sum* sums;    // (.., head_dim or value_dim padded): O or dQ
  RowState<Sum>* states;
  // The backward.
  Sum* grad_output;  // (.., value_dim padded)
  Sum* grads;        // (.., stride): dP, then dX
  Sum* slopes;       // (stride)
  char* products;    // scratch memory of the products
};

template <class Sum>
struct ListPlan {
  int64_t stride;      // of a row of scores
  int64_t heads;       // query heads that share a list and a KV head
  int64_t tile_heads;  // at most kListHeads of those
  int64_t tile_rows;
  int64_t head_tiles;  // of a KV group
  int block_shift;     // a block has 2^block_shift keys
  int64_t blocks;
  int64_t splits;         // the backward: of the rows of a KV group
  int64_t product_bytes;  // scratch memory of the products
  Sum* grad_key;          // (split of a KV group, key_length, head_dim padded); with one split, (worker, ...)
  Sum* grad_value;
  char* scratch;  // of worker 0
  int64_t scratch_bytes;
};

// Whether anything is read or written by columns of key_indices.
inline bool needs_columns(const Problem& p) { return p.dropout_p > 0 || p.weights.data || p.grad_weights.data; }

template <class Sum>
ListScratch<Sum> lay_out_list(const Problem& p, const ListPlan<Sum>& plan, Pass pass, Arena& arena) {
  const int64_t key_width = padded<Sum>(p.head_dim), value_width = padded<Sum>(p.value_dim);
  const int64_t rows = plan.tile_rows, queries = rows * plan.tile_heads;
  const bool backward = pass == Pass::backward;
  ListScratch<Sum> s;
  s.keys = take<int32_t>(arena, rows * p.list_length);
  s.columns = take<int32_t>(arena, needs_columns(p) ? rows * p.list_length : 0);
  s.starts = take<int64_t>(arena, rows * (plan.blocks + 1));
  s.unsorted = take<int32_t>(arena, p.list_length);
  s.at_column = take<int32_t>(arena, p.list_length);
  s.words = take<uint32_t>(arena, p.dropout_p > 0 ? dropout_room(p.list_length + kDropoutGroup) : 0);
  s.query = take<Sum>(arena, queries * key_width);
  s.scores = take<Sum>(arena, queries * plan.stride);
  s.sums = take<Sum>(arena, queries * (backward ? key_width : value_width));
  s.states = take<RowState<Sum>>(arena, queries);
  s.grad_output = take<Sum>(arena, backward ? queries * value_width : 0);
  s.grads = take<Sum>(arena, backward ? queries * plan.stride : 0);
  s.slopes = take<Sum>(arena, backward ? plan.stride : 0);
  s.products = take<char>(arena, plan.product_bytes);
  return s;
}

template <class Products, class Sum>
ListPlan<Sum> plan_lists(const Problem& p, Pass pass, int workers, Arena& arena) {
  const int64_t kv_groups = p.batch * p.kv_heads, group = p.heads / p.kv_heads;
  const int64_t key_width = padded<Sum>(p.head_dim), value_width = padded<Sum>(p.value_dim);
  ListPlan<Sum> plan = {};
  // A block of a list may begin anywhere, so its last vector of scores reaches up to a vector beyond the row.
  plan.stride = padded<Sum>(p.list_length) + kLanes<Sum>;
  plan.heads = min(p.heads_per_list, group);
  plan.tile_heads = min(plan.heads, kListHeads);
  plan.tile_rows = min(max(Products::kQueries / plan.tile_heads, int64_t(1)), max<int64_t>(p.query_length, 1));
  plan.head_tiles = group / plan.heads * ceil_div(plan.heads, plan.tile_heads);
  // Each product visits one array by blocks: key, value, or sums of their gradients.
  const int64_t stored = max(p.head_dim, p.value_dim) * element_size(p.dtype);
  const int64_t sums_of_key = max(key_width, value_width) * int64_t(sizeof(Sum));
  const int64_t bytes = pass == Pass::forward ? stored : sums_of_key;
  const int64_t least = plan.heads < kListHeadsAtOnce ? ceil_div(p.key_length, kListBlocks) : p.key_length;
  while (int64_t(1) << plan.block_shift < least ||
         (bytes << (plan.block_shift + 1) <= kListBlockBytes && int64_t(1) << plan.block_shift < p.key_length))
    ++plan.block_shift;
  plan.blocks = ceil_div(p.key_length, int64_t(1) << plan.block_shift);
  plan.splits = 1;
  if (pass == Pass::backward) {
    const int64_t visits = p.query_length * p.list_length / max<int64_t>(p.key_length, 1);  // of a key
    const int64_t wanted = min(ceil_div(kWantedTasks, max<int64_t>(kv_groups, 1)), visits / kListVisitsPerSplit);
    const int64_t sum_bytes = kv_groups * p.key_length * (key_width + value_width) * int64_t(sizeof(Sum));
    plan.splits = max<int64_t>(min(wanted, kListSplitBudget / max<int64_t>(sum_bytes, 1)), 1);
    const int64_t sums = p.key_length * (plan.splits > 1 ? kv_groups * plan.splits : workers);
    plan.grad_key = take<Sum>(arena, p.grad_key.data ? sums * key_width : 0);
    plan.grad_value = take<Sum>(arena, p.grad_value.data ? sums * value_width : 0);
  }
  plan.product_bytes = Products::room(plan.tile_heads, max(key_width, value_width));
  plan.scratch = take<char>(arena, 0);
  const int64_t start = arena.used;
  lay_out_list(p, plan, pass, arena);
  plan.scratch_bytes = arena.used - start;
  arena.used = start + workers * plan.scratch_bytes;
  return plan;
}

}  // namespace
}  // namespace scaledot
