// The backward on Hopper. The formulas are those of generic/backward.cuh:
//
//   for a tile of keys, by two warpgroups:
//     for each tile of rows, of each query head that shares the keys:
//       S^T = K Q^T      dP^T = V dO^T      Pd, dX (backward_scores.cuh)
//       dV += Pd^T dO    dK += dX^T Q
//       dQ of these rows += dX K            added up in global memory, the last keys first
// as in Shah et al., "FlashAttention-3", 2024. backward_consumer_narrow.cuh and backward_consumer_wide.cuh say how the
// two warpgroups divide this work.
//
// In the third warpgroup, the first warp loads tiles and the second adds to dQ, after all later tiles of keys
// (ptx/semaphore.h), so that results have the same bits every time. Blocks draw their tile of keys when they start, in
// the order of the turns, so the earliest running block never waits for a block that has not started.
//
// A masked weight is 0 here, which would not hide NaN or inf of query, key or grad_output: 0 times those is NaN. If
// scores are masked and a gradient has NaN, it is computed once more (backward_finish.cuh).
#pragma once

#include "cuda/sm90/backward_consumer_narrow.cuh"
#include "cuda/sm90/backward_consumer_wide.cuh"
#include "cuda/sm90/backward_producer.cuh"

namespace scaledot {
namespace {

template <class C>
SCALEDOT_KERNEL(C::kThreads)
sm90_backward_kernel(SCALEDOT_PARAM Problem given, SCALEDOT_PARAM Sm90BackwardPlan plan,
                     SCALEDOT_PARAM Sm90BackwardTensors from) {
#if SCALEDOT_SM90
  auto& shared = *static_cast<Sm90BackwardShared<C>*>(shared_memory());
  if constexpr (C::kPacked) {
    copy_problem<C::kThreads>(given, shared.packed.problem);
    barrier();
  }
  if (thread_index() == 0) {
    init_backward_barriers<C>(shared);
    shared_store(&shared.task, draw_backward_task<C>(given, plan, shared));
  }
  barrier();
  if (C::kPacked && shared_load(&shared.task.tile) < 0) return;
  const Problem& p = problem_of_task<C>(given, shared);
  const int group = warpgroup_index();
  if (group == C::kConsumers) {
    dealloc_registers<C::kProducerRegisters>();
    const int warp = warp_uniform(warp_index()) % 4;
    if (warp == 0 && lane_index() == 0) produce_backward<C>(plan, from, shared.task, shared);
    if (warp == 1 && plan.grad_query) accumulate_grad_query<C>(plan, shared.task, shared);
  } else {
    alloc_registers<C::kConsumerRegisters>();
    if constexpr (C::kWide) {
      Sm90WideConsumer<C> consumer = {p, plan, shared, group, {}, {}, {}};
      consume_backward<C>(consumer);
    } else {
      Sm90NarrowConsumer<C> consumer = {p, plan, shared, group, {}, {}, {}};
      consume_backward<C>(consumer);
    }
  }
#endif
}

}  // namespace
}  // namespace scaledot
