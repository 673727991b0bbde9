// A small kernel that prepares the backward for sm_90: each row's lse and delta (backward_delta.cuh) in tiles
// that the copy engine can load, and counters set to their first values.
#pragma once

#include "cuda/ptx/semaphore.h"
#include "cuda/sm90/backward_packed.cuh"

namespace scaledot {
namespace {

// Statistics of one row, also of those that pad the last tile, and its position. `number`: of the row tile.
template <class C>
SCALEDOT_DEVICE void pack_row(const Problem& p, const Sm90BackwardPlan& plan, const Sm90RowTile& tile, int64_t number,
                              int r) {
  const int64_t i = tile.tile * C::kRows + r;
  SplitLse<float> lse = {__builtin_inff(), 0};
  float delta = 0;
  Sm90RowPosition position = {};
  if (i < tile.rows.count) {
    const int64_t row = p.heads * tile.rows.first + (tile.batch * p.heads + tile.head) * tile.rows.count + i;
    lse = global_load(plan.rows.lse + row), delta = global_load(plan.rows.delta + row);
    if constexpr (C::kGeneral) {
      const RowMask<float> mask = row_mask<float>(p, tile.batch, tile.head, i);
      const Range live = intersect({mask.live.begin, mask.live.end}, {0, p.key_length});
      position = {int32_t(min(live.begin, p.key_length)),
                  int32_t(max<int64_t>(live.end, 0)),
                  int32_t(mask.aligned),
                  mask.slope,
                  mask.start,
                  p.grad_mask.data ? offset(p, p.grad_mask, tile.batch, tile.head) + i * p.grad_mask.row_stride : 0};
    }
  }
  auto& to = static_cast<typename C::Statistics*>(plan.statistics)[number];
  if constexpr (C::kGeneral) {
    global_store(&to.row[r], Sm90RowStatistics{delta, lse.offset, lse.log_sum});
    global_store(plan.positions + number * C::kRows + r, position);
  } else {
    const int place = statistics_place(r);
    global_store(&to.lse2[place], (lse.offset + lse.log_sum) * float(kLog2e));
    global_store(&to.delta[place], delta);
  }
}

// The row tiles that may attend to a tile of keys of `p`.
template <class C>
SCALEDOT_DEVICE void store_row_range(const Problem& p, int64_t key_tile, int* to) {
  const Range rows = backward_row_tiles(p, backward_keys(p, key_tile, C::kKeys), C::kRows);
  global_store(to, int(rows.begin));
  global_store(to + 1, int(rows.end));
}

// plan.row_ranges of all tiles of keys. `mine`: a copy of p in shared memory, for packed sequences.
template <class C>
SCALEDOT_DEVICE void store_row_ranges(const Problem& p, const Sm90BackwardPlan& plan, Problem* mine) {
  if constexpr (C::kPacked) {
    for (int64_t b = block_index(); b < p.batch; b += block_count()) {
      const Sm90SequenceTiles tiles = tiles_of_sequence(plan, int(b));
      barrier();
      if (thread_index() == 0) narrow_to_tiles<C>(p, tiles, *mine);
      barrier();
      for (int k = thread_index(); k < tiles.key_tiles; k += kRowThreads)
        store_row_range<C>(*mine, k, plan.row_ranges + 2 * (tiles.first_key_tile + int64_t(k)));
    }
  } else {
    for (int64_t k = block_index() * kRowThreads + thread_index(); k < plan.key_tiles; k += block_count() * kRowThreads)
      store_row_range<C>(p, k, plan.row_ranges + 2 * k);
  }
}

// A block takes one tile of rows after the other. Also initialises counters.
template <class C>
SCALEDOT_KERNEL(kRowThreads)
sm90_pack_rows_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM Sm90BackwardPlan plan) {
  static_assert(C::kRows <= kRowThreads);
  Problem* mine = C::kPacked ? static_cast<Problem*>(shared_memory()) : nullptr;
  if constexpr (C::kPacked) {
    copy_problem<kRowThreads>(p, *mine);
    barrier();
  }
  const int64_t tiles = row_tile_count<C>(p, plan);
  for (int64_t number = block_index(); number < tiles; number += block_count()) {
    const Sm90RowTile tile = row_tile<C>(p, plan, number);
    if (thread_index() < C::kRows) pack_row<C>(p, plan, tile, number, thread_index());
    if (thread_index() != 0) continue;
    if constexpr (C::kPacked) narrow_to_tiles<C>(p, tile.sequence, *mine);
    const Problem& of_rows = C::kPacked ? *mine : p;
    const int turn = backward_first_turn(of_rows, backward_rows(of_rows, tile.tile, C::kRows), C::kKeys);
    for (int part = 0; part < C::kGradQueryParts; ++part)
      global_store(plan.semaphores + number * C::kGradQueryParts + part, semaphore_before(turn));
  }
  store_row_ranges<C>(p, plan, mine);
  if (block_index() == 0 && thread_index() == 0) {
    global_store(plan.ticket, 0);
    if (plan.has_nan) global_store(plan.has_nan, 0);
  }
}

}  // namespace
}  // namespace scaledot
