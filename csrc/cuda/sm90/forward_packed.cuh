// Packed sequences in the forward. The producer makes the problem of a query tile's sequence in shared memory, where
// the consumers read it.
//
// A sequence's last tiles also have rows of the next one (packed_tiles.cuh). Their scores are masked, their values may
// need multiply_unmasked, and their output is not stored.
#pragma once

#include "cuda/sm90/forward_plan.cuh"
#include "cuda/sm90/packed_tiles.cuh"

namespace scaledot {
namespace {

// plan.starts: `starts` of the query tiles of all heads. `most`: an upper bound on their number. One block.
SCALEDOT_KERNEL(kCountThreads)
sm90_count_tiles_kernel(SCALEDOT_PARAM Problem p, int tile_rows, int most, int* starts) {
  store_tile_starts(
      p.batch, [&](int64_t b) { return p.heads * ceil_div(query_rows(p, b).count, tile_rows); }, most, starts);
}

// All threads of a block, before its first tile; a barrier follows. fill_packed_slot needs a copy of the problem.
template <class C>
SCALEDOT_DEVICE void copy_problem_to_slots(const Problem& p, Sm90ForwardShared<C>& shared) {
  for (Sm90PackedSlot& slot : shared.packed.slots) copy_problem<C::kThreads>(p, slot.problem);
}

// Makes the problem of a query tile. One thread does this. It has few registers, so it
// does only those steps of narrow_to_sequence that the consumers need.
template <class C>
SCALEDOT_DEVICE void fill_packed_slot(const Problem& p, const Sm90ForwardPlan& plan, int tile, Sm90PackedSlot& slot) {
  const int b = sequence_of_tile(plan.starts, p.batch, tile);
  const RowSpan query = query_rows(p, b), key = key_rows(p, b);
  narrow_lengths(p, query, key, slot.problem);
  narrow_pages(p, b, slot.problem);
  skip_rows(slot.problem.output, p.output, query.first);
  skip_rows(slot.problem.output_low, p.output_low, query.first);
  skip_rows(slot.problem.lse, p.lse, query.first);
  slot.first = {int(query.first), int(key.first)};
  const int row_tiles = int(ceil_div(query.count, C::kRows));
  slot.tile = sm90_tile_index({int(p.heads), row_tiles, plan.order.section}, tile - global_load(plan.starts + b));
  if constexpr (C::kQuantised) {
    const int kv_head = slot.tile.batch_head / int(p.heads / p.kv_heads);
    const auto scale = [&](const TensorView& view) {
      TensorView mine = view;
      if (p.batch_dims > 0) skip_elements(mine, view, b * view.batch_stride[0]);
      return float(cache_scale(slot.problem, mine, 0, kv_head));
    };
    slot.key_scale = scale(p.k_scale), slot.value_scale = scale(p.v_scale);
  }
}

// Copies the keys or values from `first_key` on, a Tile (Sm90CopiedTile) of kRows rows, from their pages. `step`: the
// rows of a copy. Rows of no page become 0. All threads of a warp: each looks up other pages, because a lookup waits
// for memory.
template <class Tile, int kRows>
SCALEDOT_DEVICE void load_pages(const Problem& p, const TmaTensor& from, int step, int first_key, int kv_head, char* to,
                                uint64_t* full) {
  for (int row = lane_index() * step; row < kRows; row += kWarpSize * step) {
    PageRow at = {0, int(p.pages.size)};  // past the last row of a page
    if (first_key + row < int(p.key_length)) at = page_row(p.pages, first_key + row);
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel)
      tensor_load(to + panel * Tile::kPanelBytes + row * Tile::kRowBytes, from.map, full, panel * Tile::kRowBytes / 2,
                  at.row, kv_head * from.head_step, int(at.page) * from.batch_step);
  }
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
    return sm90_tile_number(plan.order, {rows.batch_head, rows.first / (C::kCluster * C::kRows)});
}

// The factor that the sums of quantised values still lack.
template <class C>
SCALEDOT_DEVICE float value_scale_of_slot(int slot, const Sm90ForwardShared<C>& shared) {
  if constexpr (C::kQuantised)
    return shared.packed.slots[slot].value_scale;
  else
    return 1;
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
SCALEDOT_DEVICE void store_last_rows(const Problem& p, int batch_head, int first_row, const Sm90OutputTile<C>& buffer) {
  using Storage = typename C::Storage;
  constexpr int kChunk = 8;  // elements of 16 bytes
  using Chunk = AlignedVector<Storage, kChunk>;
  Storage* to = element_ptr<Storage>(p, p.output, 0, batch_head) + first_row * p.output.row_stride;
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
