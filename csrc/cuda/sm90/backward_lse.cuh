// The second kernel of the backward for sm_90: lse once more, as two numbers, of tiles of rows where one number is not
// precise enough (core/softmax.h). The grid is small and does nothing unless the first kernel has found such rows. The
// host does not know: it always launches it.
#pragma once

#include "cuda/generic/backward_prepare.cuh"
#include "cuda/ptx/launch.h"
#include "cuda/sm90/backward_prepare.cuh"

namespace scaledot {
namespace {

template <class Storage, bool kPacked>
using LseConfig = ScoresConfig<Storage, kPacked>;

// Stores lse of a row for this kernel's successors. `p`: of its sequence, whose number is `sequence`.
template <bool kPacked>
SCALEDOT_DEVICE void store_split_lse(const Problem& p, const Sm90BackwardPlan& plan, int sequence,
                                     const StackedTile& tile, const ThreadRow<float>& row, const SplitLse<float>& lse) {
  const int64_t row_tile = row.i / plan.row_tile_rows;
  int64_t number = (int64_t(tile.batch) * p.heads + row.head) * plan.row_tiles + row_tile;
  if constexpr (kPacked) {
    const Sm90SequenceTiles tiles = tiles_of_sequence(plan, sequence);
    if (row_tile >= tiles.row_tiles) return;  // cu_seq is wrong
    number = p.heads * tiles.first_row_tile + int64_t(row.head) * tiles.row_tiles + row_tile;
  }
  global_store(plan.rows.lse + row_number(p, tile, row), lse);
  const int r = int(row.i % plan.row_tile_rows);
  if (plan.positions) {
    Sm90RowStatistics* to = general_statistics(plan, plan.row_tile_rows, number, r);
    global_store(&to->offset, lse.offset);
    global_store(&to->log_sum, lse.log_sum);
  } else {
    global_store(plain_statistics(plan, plan.row_tile_rows, number, r), plain_lse(lse));
  }
}

// Whether the first kernel's blocks have found a row whose lse is not precise.
SCALEDOT_DEVICE bool any_imprecise(const Sm90BackwardPlan& plan, int threads) {
  bool imprecise = false;
  for (int64_t k = thread_index(); k < plan.imprecise_blocks; k += threads)
    imprecise |= global_load(plan.imprecise + k) != 0;
  return barrier_or(imprecise);
}

// A block takes one of `tiles` tiles after the other.
template <class Storage, bool kPacked>
SCALEDOT_KERNEL((kThreads<LseConfig<Storage, kPacked>, kForwardColumnWarps>))
sm90_lse_kernel(SCALEDOT_PARAM Problem given, SCALEDOT_PARAM Sm90BackwardPlan plan, SCALEDOT_PARAM StackedTiling tiling,
                int64_t tiles) {
#if SCALEDOT_SM90
  using C = LseConfig<Storage, kPacked>;
  constexpr int kBlock = kThreads<C, kForwardColumnWarps>;
  if (!any_imprecise(plan, kBlock)) return;
#pragma unroll 1
  for (int64_t index = block_index(); index < tiles; index += block_count()) {
    int64_t kv_group = index / tiles_per_kv_group(tiling);
    const int sequence = int(kv_group / given.kv_heads);
    const Problem& p = problem_of_block<C, kBlock>(given, kv_group, end_of_scores<C>());
    const StackedTile tile = query_tile(p, tiling, kv_group, index % tiles_per_kv_group(tiling));
    if (!is_empty<C>(tile))
      prepare_lse<C, float>(p, tile, false, [&](const ThreadRow<float>& row, const SplitLse<float>& lse) {
        store_split_lse<kPacked>(p, plan, sequence, tile, row, lse);
      });
    barrier();
  }
#endif
}

template <class Storage, bool kPacked>
const char* launch_lse(const Problem& p, const Sm90BackwardPlan& plan, DeviceStream stream) {
  using C = LseConfig<Storage, kPacked>;
  const StackedTiling tiling = query_tiling(p, C::kSide, true);
  const int64_t tiles = p.batch * p.kv_heads * tiles_per_kv_group(tiling);
  return launch(sm90_lse_kernel<Storage, kPacked>, min<int64_t>(tiles, 2 * device_traits().multiprocessors),
                kThreads<C, kForwardColumnWarps>, kSharedBytes<C, GenericScoresShared<C>>, stream, p, plan, tiling,
                tiles);
}

}  // namespace
}  // namespace scaledot
