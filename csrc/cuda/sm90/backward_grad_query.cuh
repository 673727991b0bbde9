// The way of grad_query in the backward: from the consumers' registers to shared memory, from there to float32 sums in
// global memory, and after the last block to the result.
//
// Blocks add to a row tile's sums one after the other, the last keys first (backward_turn), so that results have the
// same bits every time (ptx/semaphore.h).
#pragma once

#include "cuda/ptx/semaphore.h"
#include "cuda/ptx/sync.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90/backward_prepare.cuh"
#include "cuda/sm90/backward_tasks.cuh"

namespace scaledot {
namespace {

// A consumer writes its sums of one part of its columns to shared memory, for the adding warp. `first`: the first of
// the block.
template <class C>
SCALEDOT_DEVICE void publish_grad_query(Sm90BackwardShared<C>& shared, int group, bool first,
                                        const float (&sums)[C::kGradQueryPartCols / 2]) {
  using Four = AlignedVector<float, 4>;
  if (!first) named_barrier_wait(kSumsTaken + group, kWarpgroupThreads + kWarpSize);
  Four* to = reinterpret_cast<Four*>(shared.grad_query[group]) + thread_index() % kWarpgroupThreads;
#pragma unroll
  for (int n = 0; n < C::kGradQueryPartCols / 8; ++n)
    shared_store(to + n * kWarpgroupThreads, Four{{sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3]}});
  fence_async();
  named_barrier_arrive(kSumsReady + group, kWarpgroupThreads + kWarpSize);
}

// One warp: adds what the consumers publish to grad_query, when the row tile's semaphore has reached this key tile. The
// sums of all consumers are on their way before the first of them is waited for.
template <class C>
SCALEDOT_DEVICE void accumulate_grad_query(const Sm90BackwardPlan& plan, const Sm90BackwardTask& task,
                                           Sm90BackwardShared<C>& shared) {
  constexpr int kPartSums = kWgmmaRows * C::kGradQueryPartCols;
  static_assert(C::kConsumers == 2);
  const int turn = backward_turn(shared_load(&task.key_tiles), shared_load(&task.tile));
  for_each_step(task, [&](const Sm90BackwardStep& step) {
    const int64_t tile = tile_number(task, step);
#pragma unroll 1
    for (int part = 0; part < C::kGradQueryParts; ++part) {
      int* semaphore = plan.semaphores + tile * C::kGradQueryParts + part;
      if (lane_index() == 0) semaphore_wait(semaphore, turn);
      warp_barrier();
#pragma unroll 1
      for (int group = 0; group < C::kConsumers; ++group) {
        named_barrier_wait(kSumsReady + group, kWarpgroupThreads + kWarpSize);
        if (lane_index() == 0) {
          bulk_reduce_add(plan.grad_query + ((tile * C::kConsumers + group) * C::kGradQueryParts + part) * kPartSums,
                          shared.grad_query[group], kPartSums * int(sizeof(float)));
          bulk_commit();
        }
      }
      const bool is_read_again = part + 1 < C::kGradQueryParts || !is_last(task, step);
      const auto give_back = [&](int group) {
        warp_barrier();
        if (is_read_again) named_barrier_arrive(kSumsTaken + group, kWarpgroupThreads + kWarpSize);
      };
      if (lane_index() == 0) bulk_wait_read<1>();
      give_back(0);
      if (lane_index() == 0) bulk_wait_read<0>();
      give_back(1);
      if (lane_index() == 0) {
        bulk_wait<0>();
        semaphore_release(semaphore);
      }
      warp_barrier();
    }
  });
}

// The last kernel: grad_query = scale times the sums. One thread converts four sums.
template <class C>
SCALEDOT_KERNEL(kRowThreads)
sm90_store_grad_query_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM Sm90BackwardPlan plan) {
  using Storage = typename C::Storage;
  using Four = AlignedVector<float, 4>;
  constexpr int kPerShare = kWgmmaRows * C::kGradQueryCols / 4, kPerTile = C::kConsumers * kPerShare;
  const int64_t tiles = row_tile_count<C>(p, plan);
  for (int64_t number = block_index(); number < tiles; number += block_count()) {
    const Sm90RowTile tile = row_tile<C>(p, plan, number);
    const Four* from = reinterpret_cast<const Four*>(plan.grad_query) + number * kPerTile;
    Storage* to =
        element_ptr<Storage>(p, p.grad_query, tile.batch, tile.head) + tile.rows.first * p.grad_query.row_stride;
    for (int k = thread_index(); k < kPerTile; k += kRowThreads) {
      const int share = k / kPerShare, within = k % kPerShare, thread = within % 128, group = within / 128;
      const int first_row = C::kSplitsRows ? share * kWgmmaRows : 0;
      const int first_col = C::kSplitsRows ? 0 : share * C::kGradQueryCols;
      const Four sums = global_load(from + k);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const GradQueryPosition at_sum = grad_query_position(thread, group, e);
        const int64_t row = tile.tile * C::kRows + first_row + at_sum.row, col = first_col + at_sum.col;
        if (row >= tile.rows.count || col >= p.head_dim) continue;
        if (plan.has_nan && sums.x[e] != sums.x[e]) global_store(plan.has_nan, 1);
        Storage x;
        narrow(sums.x[e] * float(p.scale), x);
        global_store(to + row * p.grad_query.row_stride + col * p.grad_query.col_stride, x);
      }
    }
  }
}

}  // namespace
}  // namespace scaledot
