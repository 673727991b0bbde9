// Packed sequences in the forward. Their lengths are read on the device only, so the host never waits for them: a small
// kernel counts the tiles of each sequence, and the producer makes the problem of a query tile's sequence in shared
// memory, where the consumers read it.
//
// Copies read the rows of all sequences as one tensor. So the last tile of a sequence has rows of the next one. Their
// scores are masked, their values may need multiply_unmasked, and their output is not stored.
#pragma once

#include "core/varlen.h"
#include "cuda/sm90/forward_plan.cuh"

namespace scaledot {
namespace {

constexpr int kCountThreads = 256;

struct Sm90CountShared {
  int64_t tiles[kCountThreads];
};

// starts[b]: the number of query tiles (of all heads) of the sequences before b; starts[batch]: of all. `most`: an
// upper bound on it. One block, whose threads take a range of sequences each. cu_seq is not validated, so the numbers
// are clamped.
SCALEDOT_KERNEL(kCountThreads)
sm90_count_tiles_kernel(SCALEDOT_PARAM Problem p, int tile_rows, int most, int* starts) {
  auto& shared = *static_cast<Sm90CountShared*>(shared_memory());
  const int thread = thread_index();
  const int64_t share = ceil_div(p.batch, kCountThreads);
  const int64_t begin = min(thread * share, p.batch), end = min(begin + share, p.batch);
  const auto tiles_of = [&](int64_t b) { return p.heads * ceil_div(query_rows(p, b).count, tile_rows); };
  int64_t tiles = 0;
  for (int64_t b = begin; b < end; ++b) tiles += tiles_of(b);
  shared_store(&shared.tiles[thread], tiles);
  barrier();
  tiles = 0;
  for (int t = 0; t < thread; ++t) tiles += shared_load(&shared.tiles[t]);
  const auto store = [&](int64_t b) { global_store(starts + b, int(min<int64_t>(tiles, most))); };
  for (int64_t b = begin; b < end; ++b) {
    store(b);
    tiles += tiles_of(b);
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
  const int b = sequence_of_tile(plan.starts, p.batch, tile);
  const RowSpan query = query_rows(p, b), key = key_rows(p, b);
  narrow_lengths(p, query, key, slot.problem);
  skip_rows(slot.problem.output, p.output, query.first);
  skip_rows(slot.problem.lse, p.lse, query.first);
  slot.first = {int(query.first), int(key.first)};
  const int row_tiles = int(ceil_div(query.count, C::kRows));
  slot.tile = sm90_tile_index({int(p.heads), row_tiles, plan.order.section}, tile - global_load(plan.starts + b));
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

// The number of that query tile. A slot of packed sequences still has it. Otherwise the slot may be in use again, and a
// register for the number would be taken through the loop over keys.
template <class C>
SCALEDOT_DEVICE int tile_of_slot(const Sm90ForwardPlan& plan, const Sm90ThreadRows<C>& rows, int slot,
                                 const Sm90ForwardShared<C>& shared) {
  if constexpr (C::kPacked)
    return shared_load(&shared.tile[slot]);
  else
    return sm90_tile_number(plan.order, {rows.batch_head, rows.first / C::kRows});
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
