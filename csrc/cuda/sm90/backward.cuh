// The backward on sm_90's tensor cores and copy engine; formulas as in generic/backward.cuh.
//
//   for a tile of keys, by two warpgroups:
//     for each tile of rows, of each query head that shares the keys:
//       S^T = K Q^T      dP^T = V dO^T      Pd, dX (backward_scores.cuh)
//       dV += Pd^T dO    dK += dX^T Q
//       dQ of these rows += dX K            added up in global memory, in the order of the keys
// as Shah et al., "FlashAttention-3", 2024, have it. How the warpgroups share this: backward_narrow.cuh and
// backward_wide.cuh.
//
// The third warpgroup's first warp loads, its second adds to dQ: when all earlier tiles of keys have (ptx/turn.h), so that results have
// the same bits every time. Blocks take their tile of keys when they begin, in order: the earliest one that still runs never waits.
//
// A masked weight is 0 here, which would not hide NaN or inf: where scores are masked and query, key or grad_output have any, this kernel
// leaves everything to the generic ones (backward_rows.cuh).
#pragma once

#include "cuda/sm90/backward_narrow.cuh"
#include "cuda/sm90/backward_wide.cuh"

namespace scaledot {
namespace {

template <class C>
SCALEDOT_KERNEL(C::kThreads)
backward_kernel90(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM BackwardPlan90 plan, SCALEDOT_PARAM Sources from) {
#if SCALEDOT_SM90
  auto& shared = *static_cast<BackwardShared90<C>*>(shared_memory());
  if (thread_index() == 0) {
    make_barriers<C>(shared);
    const int64_t index = atomic_add(plan.ticket, 1);
    const int* rows = plan.row_ranges + 2 * (index % plan.key_tiles);
    shared_store(&shared.task, backward_task<C>(p, plan.key_tiles, index, global_load(rows), global_load(rows + 1)));
  }
  barrier();
  if (is_wild(plan)) return;
  const int group = warpgroup_index();
  if (group == C::kConsumers) {
    give_registers<C::kProducerRegisters>();
    const int warp = warp_uniform(warp_index()) % 4;
    if (warp == 0 && lane_index() == 0) load_tiles<C>(p, plan, from, shared.task, shared);
    if (warp == 1 && plan.grad_query) add_grad_query<C>(p, plan, shared.task, shared);
  } else {
    take_registers<C::kConsumerRegisters>();
    if constexpr (C::kWide)
      consume_wide<C>(p, plan, shared, group);
    else
      consume_narrow<C>(p, plan, shared, group);
  }
#endif
}

}  // namespace
}  // namespace scaledot
