// The decode kernel's tasks and its scratch memory.
#pragma once

#include "core/arena.h"
#include "cpu/simd/attention/softmax.h"

namespace scaledot {
namespace {

// The order in which keys are read: as kDecodeStreams contiguous parts, one key of each at every step.
struct Streams {
  int64_t steps;  // keys in a part

  explicit Streams(int64_t keys) : steps(ceil_div(keys, int64_t(kDecodeStreams))) {}
  int64_t key(int64_t step, int64_t stream) const { return stream * steps + step; }  // may be past the last key
};

// Scratch memory for one KV head.
template <class Sum>
struct DecodeScratch {
  Sum* query;   // (kDecodeRows, head_dim padded)
  Sum* scores;  // (kDecodeRows, kDecodeChunk)
  Sum* sums;    // (kDecodeRows, value_dim padded): P V of neighbouring key tiles
  RowTerms<Sum> terms;
};

// A KV head that takes its turn with a chunk.
template <class Sum>
struct DecodeHead {
  QueryTile tile;  // all its rows
  DecodeScratch<Sum> scratch;
  int64_t part;  // its first row in `softmax` of the plan
  Sum* output;   // of the chunk
};

template <class Sum>
struct DecodePlan {
  int64_t turns;             // KV heads that take turns with a chunk; divides kv_heads
  int64_t rows;              // query rows of a KV group
  int64_t chunks;            // of its keys
  int64_t width;             // value_dim padded
  SoftmaxRows<Sum> softmax;  // (KV group, chunk, row)
  Sum* output;               // (KV group, chunk, row, width)
  char* scratch;             // of worker 0
  int64_t scratch_bytes;
};

template <class Sum>
DecodeScratch<Sum> lay_out_decode(const Problem& p, Arena& arena) {
  return {take<Sum>(arena, kDecodeRows * padded<Sum>(p.head_dim)), take<Sum>(arena, kDecodeRows * kDecodeChunk),
          take<Sum>(arena, kDecodeRows * padded<Sum>(p.value_dim)), lay_out_row<Sum>(arena)};
}

// Whether the heads of a key are neighbours in memory, so that the rows of a head are not.
inline bool heads_are_together(const Problem& p) {
  return p.key.head_stride < p.key.row_stride && p.value.head_stride < p.value.row_stride;
}

// Heads that see different tiles take no turns.
inline int64_t heads_in_turn(const Problem& p, int64_t chunks, int workers) {
  const bool own_tiles = (p.attn_mask.data && p.attn_mask.head_stride) || (has_blocks(p) && p.blocks.head_stride);
  const int64_t bytes = p.key_length * p.key.row_stride * element_size(p.key.dtype);
  if (own_tiles || !heads_are_together(p) || bytes < kPrefetchFrom) return 1;
  const int64_t tasks = p.batch * p.kv_heads * chunks;
  int64_t turns = max(min(p.kv_heads, kTurnHeads), int64_t(1));
  while (turns > 1 && (p.kv_heads % turns || tasks < turns * workers * kTasksPerWorker)) --turns;
  return turns;
}

template <class Sum>
DecodePlan<Sum> plan_decode(const Problem& p, int workers, Arena& arena) {
  DecodePlan<Sum> plan = {};
  plan.rows = p.heads / p.kv_heads * p.query_length;
  plan.chunks = max<int64_t>(ceil_div(p.key_length, kDecodeChunk), 1);
  plan.turns = heads_in_turn(p, plan.chunks, workers);
  plan.width = padded<Sum>(p.value_dim);
  const int64_t parts = p.batch * p.kv_heads * plan.chunks * plan.rows;
  plan.softmax = lay_out_softmax<Sum>(arena, parts);
  plan.output = take<Sum>(arena, parts * plan.width);
  plan.scratch = take<char>(arena, 0);
  const int64_t start = arena.used;
  for (int64_t head = 0; head < plan.turns; ++head) lay_out_decode<Sum>(p, arena);
  plan.scratch_bytes = arena.used - start;
  arena.used = start + workers * plan.scratch_bytes;
  return plan;
}

}  // namespace
}  // namespace scaledot
