// The way of grad_query in the backward: from the consumers' registers to shared memory, and from there to float32 sums
// in global memory. The last kernel stores the result (backward_finish.cuh).
//
// Blocks add to a row tile's sums one after the other, the last keys first (backward_turn), so that results have the
// same bits every time (ptx/semaphore.h). The first of them stores its sums, so nobody clears the memory before.
#pragma once

#include "cuda/ptx/semaphore.h"
#include "cuda/ptx/sync.h"
#include "cuda/ptx/tma.h"
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
      const bool stores = lane_index() == 0 && semaphore_wait(semaphore, turn);
      warp_barrier();
#pragma unroll 1
      for (int group = 0; group < C::kConsumers; ++group) {
        named_barrier_wait(kSumsReady + group, kWarpgroupThreads + kWarpSize);
        if (lane_index() == 0) {
          float* to = plan.grad_query + ((tile * C::kConsumers + group) * C::kGradQueryParts + part) * kPartSums;
          const bool last = group + 1 == C::kConsumers && part + 1 == C::kGradQueryParts;
          const int bytes = kWgmmaRows * (last ? C::kLastPartCols : C::kGradQueryPartCols) * int(sizeof(float));
          if (stores)
            bulk_store(to, shared.grad_query[group], bytes);
          else
            bulk_reduce_add(to, shared.grad_query[group], bytes);
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
        semaphore_release(semaphore, turn);
      }
      warp_barrier();
    }
  });
}

}  // namespace
}  // namespace scaledot
