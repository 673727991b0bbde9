// The first kernel of the backward for sm_90 (backward_delta.cuh) stores more than delta and lse: both in tiles that
// the copy engine can load, the row tiles of each key tile, and counters set to their first values.
#pragma once

#include "cuda/ptx/semaphore.h"
#include "cuda/sm90/backward_packed.cuh"

namespace scaledot {
namespace {

// Where the numbers of row r of a row tile are, for plain scores: lse2, and delta `rows` after it.
SCALEDOT_DEVICE float* plain_statistics(const Sm90BackwardPlan& plan, int rows, int64_t number, int r) {
  return static_cast<float*>(plan.statistics) + number * 2 * rows + statistics_place(r);
}
SCALEDOT_DEVICE Sm90RowStatistics* general_statistics(const Sm90BackwardPlan& plan, int rows, int64_t number, int r) {
  return static_cast<Sm90RowStatistics*>(plan.statistics) + number * rows + r;
}
SCALEDOT_DEVICE float plain_lse(const SplitLse<float>& lse) { return (lse.offset + lse.log_sum) * float(kLog2e); }

// Statistics of one row, also of those that pad the last tile, and its position. `number`: of the row tile.
template <class C>
SCALEDOT_DEVICE void pack_row(const Problem& p, const Sm90BackwardPlan& plan, const Sm90RowTile& tile, int64_t number,
                              int r, const SplitLse<float>& lse, float delta) {
  if constexpr (C::kGeneral) {
    const int64_t i = tile.tile * C::kRows + r;
    Sm90RowPosition position = {};
    if (i < tile.rows.count) {
      const RowMask<float> mask = row_mask<float>(p, tile.batch, tile.head, i);
      const Range live = intersect({mask.live.begin, mask.live.end}, {0, p.key_length});
      position = {int32_t(min(live.begin, p.key_length)),
                  int32_t(max<int64_t>(live.end, 0)),
                  int32_t(mask.aligned),
                  mask.slope,
                  mask.start,
                  p.grad_mask.data ? offset(p, p.grad_mask, tile.batch, tile.head) + i * p.grad_mask.row_stride : 0};
    }
    global_store(general_statistics(plan, C::kRows, number, r), Sm90RowStatistics{delta, lse.offset, lse.log_sum});
    global_store(plan.positions + number * C::kRows + r, position);
  } else {
    float* to = plain_statistics(plan, C::kRows, number, r);
    global_store(to, plain_lse(lse));
    global_store(to + C::kRows, delta);
  }
}

// The semaphores of a row tile. `mine`: as in store_row_ranges.
template <class C>
SCALEDOT_DEVICE void store_semaphores(const Problem& p, const Sm90BackwardPlan& plan, const Sm90RowTile& tile,
                                      int64_t number, Problem* mine) {
  if constexpr (C::kPacked) narrow_to_tiles<C>(p, tile.sequence, *mine);
  const Problem& of_rows = C::kPacked ? *mine : p;
  const int turn = backward_first_turn(of_rows, backward_rows(of_rows, tile.tile, C::kRows), C::kKeys);
  for (int part = 0; part < C::kGradQueryParts; ++part)
    global_store(plan.semaphores + number * C::kGradQueryParts + part, semaphore_before(turn));
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

}  // namespace
}  // namespace scaledot
