// Packed sequences in the forward. Their lengths are read on the device only, so the host never waits for them: a small
// kernel counts the tiles of each sequence, and the producer makes the problem of a query tile's sequence in shared
// memory, where the consumers read it.
//
// Copies read the rows of all sequences as one tensor. So the last tile of a sequence has rows of the next one. Their
// scores are masked, their values may need multiply_unmasked, and their output is not stored.
#pragma once

#include "core/varlen.h"
#include "cuda/sm90/forward_nonfinite.cuh"
#include "cuda/sm90/forward_plan.cuh"

namespace scaledot {
namespace {

constexpr int kCountThreads = 256;

struct Sm90CountShared {
  int64_t query_tiles[kCountThreads], key_tiles[kCountThreads];
};

// For each sequence the number of query tiles (of all heads) and of key tiles before it. The last entry is the number
// of all. One block, whose threads take a range of sequences each. cu_seq is not validated, so the numbers are clamped.
SCALEDOT_KERNEL(kCountThreads)
sm90_count_tiles_kernel(SCALEDOT_PARAM Problem p, Sm90TileStarts starts) {
  auto& shared = *static_cast<Sm90CountShared*>(shared_memory());
  const int thread = thread_index();
  const int64_t share = ceil_div(p.batch, kCountThreads);
  const int64_t begin = min(thread * share, p.batch), end = min(begin + share, p.batch);
  const auto query_tiles = [&](int64_t b) { return p.heads * ceil_div(query_rows(p, b).count, starts.tile_rows); };
  const auto key_tiles = [&](int64_t b) { return ceil_div(key_rows(p, b).count, starts.tile_keys); };
  int64_t queries = 0, keys = 0;
  for (int64_t b = begin; b < end; ++b) queries += query_tiles(b), keys += key_tiles(b);
  shared_store(&shared.query_tiles[thread], queries);
  shared_store(&shared.key_tiles[thread], keys);
  barrier();
  queries = keys = 0;
  for (int t = 0; t < thread; ++t)
    queries += shared_load(&shared.query_tiles[t]), keys += shared_load(&shared.key_tiles[t]);
  const auto store = [&](int64_t b) {
    global_store(starts.query + b, int(min<int64_t>(queries, starts.query_tiles)));
    global_store(starts.key + b, int(min<int64_t>(keys, starts.key_tiles)));
  };
  for (int64_t b = begin; b < end; ++b) {
    store(b);
    queries += query_tiles(b), keys += key_tiles(b);
  }
  if (thread == kCountThreads - 1) store(p.batch);
}

// The last sequence with starts[b] <= tile, so that it has the tile. 0 <= tile < starts[count].
SCALEDOT_DEVICE int sequence_of_tile(const int* starts, int64_t count, int tile) {
  int low = 0, high = int(count);  // starts[low] <= tile < starts[high]
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (global_load(starts + middle) <= tile ? low : high) = middle;
  }
  return low;
}

// finite[key tile, kv head], as in sm90_finite_values_kernel. A tile's rows are those that its copy reads.
template <class Storage>
SCALEDOT_KERNEL(kFiniteThreads)
sm90_finite_packed_values_kernel(SCALEDOT_PARAM Problem p, Sm90TileStarts starts, uint8_t* finite) {
  const int tile = int(block_index() / p.kv_heads), kv_head = int(block_index() % p.kv_heads);
  if (tile >= global_load(starts.key + p.batch)) return;
  const int b = sequence_of_tile(starts.key, p.batch, tile);
  const int64_t first = key_rows(p, b).first + int64_t(tile - global_load(starts.key + b)) * starts.tile_keys;
  const int64_t count = max<int64_t>(min<int64_t>(starts.tile_keys, p.packed.total_k - first), 0);
  const Storage* values = static_cast<const Storage*>(p.value.data) + kv_head * p.value.head_stride;
  const bool found = has_nonfinite_rows(values + first * p.value.row_stride, p.value.row_stride, count, p.value_dim);
  if (thread_index() == 0) global_store(finite + block_index(), uint8_t(!found));
}

// All threads of a block, before its first tile; a barrier follows. fill_packed_slot needs a copy of the problem.
template <class C>
SCALEDOT_DEVICE void copy_problem_to_slots(const Problem& p, Sm90ForwardShared<C>& shared) {
  constexpr int kWord = 8, kWords = int(sizeof(Problem)) / kWord;
  static_assert(sizeof(Problem) % kWord == 0);
  for (Sm90PackedSlot& slot : shared.packed.slots)
    for (int k = thread_index(); k < kWords; k += C::kThreads)
      __builtin_memcpy(reinterpret_cast<char*>(&slot.problem) + k * kWord,
                       reinterpret_cast<const char*>(&p) + k * kWord, kWord);
}

// Makes the problem of a query tile. One thread. Of narrow_to_sequence it does what the consumers need: it
// has few registers.
template <class C>
SCALEDOT_DEVICE void fill_packed_slot(const Problem& p, const Sm90ForwardPlan& plan, int tile, Sm90PackedSlot& slot) {
  const int b = sequence_of_tile(plan.starts.query, p.batch, tile);
  const RowSpan query = query_rows(p, b), key = key_rows(p, b);
  narrow_lengths(p, query, key, slot.problem);
  skip_rows(slot.problem.output, p.output, query.first);
  skip_rows(slot.problem.lse, p.lse, query.first);
  slot.first = {int(query.first), int(key.first)};
  slot.first_key_tile = global_load(plan.starts.key + b);
  const int row_tiles = int(ceil_div(query.count, C::kRows));
  slot.tile = sm90_tile_index({int(p.heads), row_tiles, plan.order.section}, tile - global_load(plan.starts.query + b));
}

// The problem and the task of query tile `tile`, which is in a slot. All tiles have one problem if there are no packed
// sequences.
template <class C>
SCALEDOT_DEVICE const Problem& problem_of_slot(const Problem& p, int slot, const Sm90ForwardShared<C>& shared) {
  if constexpr (C::kPacked)
    return shared.packed.slots[slot].problem;
  else
    return p;
}
template <class C>
SCALEDOT_DEVICE Sm90ForwardTask task_of_slot(const Problem& p, const Sm90ForwardPlan& plan, int tile, int slot,
                                             const Sm90ForwardShared<C>& shared) {
  if constexpr (C::kPacked)
    return sm90_forward_task<C>(p, shared.packed.slots[slot].tile);
  else
    return sm90_forward_task<C>(p, sm90_tile_index(plan.order, tile));
}

template <class C>
SCALEDOT_DEVICE int first_query_of_slot(int slot, const Sm90ForwardShared<C>& shared) {
  if constexpr (C::kPacked)
    return shared.packed.slots[slot].first.query;
  else
    return 0;
}

// Stores the output of the last rows of a sequence, which `buffer` has. All threads of a warpgroup. TMA would also
// store the rows after them, which are those of the next sequence.
template <class C>
SCALEDOT_DEVICE void store_last_rows(const Problem& p, int batch_head, int first_row,
                                     const SwizzledTile<kWgmmaRows, C::kDim>& buffer) {
  using Storage = typename C::Storage;
  constexpr int kChunk = 8;  // elements of 16 bytes
  using Chunk = AlignedVector<Storage, kChunk>;
  Storage* to = at<Storage>(p, p.output, 0, batch_head) + first_row * p.output.row_stride;
  const int chunks = int(ceil_div(p.value_dim, kChunk)), rows = int(p.query_length) - first_row;
  for (int k = thread_index() % kWarpgroupThreads; k < rows * chunks; k += kWarpgroupThreads) {
    const int row = k / chunks, col = k % chunks * kChunk;
    const int place = col / kPanelCols * buffer.kPanelBytes + swizzled_byte(row, col % kPanelCols * 2);
    const Chunk chunk = shared_load(reinterpret_cast<const Chunk*>(reinterpret_cast<const char*>(buffer.data) + place));
    Storage* dest = to + row * p.output.row_stride + col;
    if (col + kChunk <= p.value_dim)
      global_store(reinterpret_cast<Chunk*>(dest), chunk);
    else
      for (int e = 0; col + e < p.value_dim; ++e) global_store(dest + e, chunk.x[e]);
  }
}

}  // namespace
}  // namespace scaledot
