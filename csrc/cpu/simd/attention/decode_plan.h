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

template <class T>
struct DecodeScratch {
  T* query;   // (kDecodeRows, head_dim padded)
  T* scores;  // (kDecodeRows, kDecodeChunk)
  T* sums;    // (kDecodeRows, value_dim padded): P V of neighbouring key tiles
  RowTerms<T> terms;
};

template <class T>
struct DecodePlan {
  int64_t rows;            // query rows of a (batch, kv head) pair
  int64_t chunks;          // of its keys
  int64_t width;           // value_dim padded
  SoftmaxRows<T> softmax;  // (pair, chunk, row)
  T* output;               // (pair, chunk, row, width)
  char* scratch;           // of worker 0
  int64_t scratch_bytes;
};

template <class T>
DecodeScratch<T> lay_out_decode(const Problem& p, Arena& arena) {
  return {take<T>(arena, kDecodeRows * padded<T>(p.head_dim)), take<T>(arena, kDecodeRows * kDecodeChunk),
          take<T>(arena, kDecodeRows * padded<T>(p.value_dim)), lay_out_row<T>(arena)};
}

template <class T>
DecodePlan<T> plan_decode(const Problem& p, int workers, Arena& arena) {
  DecodePlan<T> plan = {};
  plan.rows = p.heads / p.kv_heads * p.query_length;
  plan.chunks = max<int64_t>(ceil_div(p.key_length, kDecodeChunk), 1);
  plan.width = padded<T>(p.value_dim);
  const int64_t parts = p.batch * p.kv_heads * plan.chunks * plan.rows;
  plan.softmax = lay_out_softmax<T>(arena, parts);
  plan.output = take<T>(arena, parts * plan.width);
  plan.scratch = take<char>(arena, 0);
  const int64_t start = arena.used;
  lay_out_decode<T>(p, arena);
  plan.scratch_bytes = arena.used - start;
  arena.used = start + workers * plan.scratch_bytes;
  return plan;
}

}  // namespace
}  // namespace scaledot
