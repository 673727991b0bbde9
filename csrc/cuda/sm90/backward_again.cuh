// All gradients once more by the generic kernels' code, which leaves out masked terms exactly. The grids are small and
// do nothing unless a gradient has NaN. The host does not know: it launches them whenever scores may be masked.
#pragma once

#include "cuda/generic/backward.cuh"
#include "cuda/ptx/launch.h"
#include "cuda/sm90/backward_plan.cuh"

namespace scaledot {
namespace {

// Panels of 64 columns for every head dimension: a wider panel would spill registers in these loops.
template <class Storage, bool kPacked>
using AgainConfig = GenericConfig<Storage, 64, kPacked, !kPacked>;

constexpr int kAgainBlocks = 2;  // a multiprocessor: as many as run at the same time

// Calls compute(block) for all blocks of a larger grid.
template <class Compute>
SCALEDOT_DEVICE void compute_again(const Sm90BackwardPlan& plan, int64_t blocks, const Compute& compute) {
  if (global_load(plan.has_nan) == 0) return;
#pragma unroll 1
  for (int64_t block = block_index(); block < blocks; block += block_count()) {
    compute(block);
    barrier();
  }
}

template <class C>
SCALEDOT_KERNEL((kThreads<C, kBackwardColumnWarps>))
sm90_grad_query_again_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM Sm90BackwardPlan plan,
                             SCALEDOT_PARAM GenericBackwardPlan<float> again, int64_t blocks) {
#if SCALEDOT_SM90
  compute_again(plan, blocks, [&](int64_t block) { compute_grad_query<C>(p, again, block); });
#endif
}

template <class C>
SCALEDOT_KERNEL((kThreads<C, kBackwardColumnWarps>))
sm90_grad_key_value_again_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM Sm90BackwardPlan plan,
                                 SCALEDOT_PARAM GenericBackwardPlan<float> again, int64_t blocks) {
#if SCALEDOT_SM90
  compute_again(plan, blocks, [&](int64_t block) { compute_grad_key_value<C>(p, again, block); });
#endif
}

template <class Storage, bool kPacked>
const char* launch_backward_again(const Problem& p, const Sm90BackwardPlan& plan, DeviceStream stream) {
  using C = AgainConfig<Storage, kPacked>;
  constexpr int kBlock = kThreads<C, kBackwardColumnWarps>;
  const int64_t most = kAgainBlocks * device_traits().multiprocessors, kv_heads = p.batch * p.kv_heads;
  GenericBackwardPlan<float> again = {};
  again.rows = plan.rows;
  again.tiling = query_tiling(p, C::kSide, true);
  again.writes_mask = p.grad_mask.data;
  const auto run = [&](auto kernel, int64_t blocks) {
    return launch(kernel, min(blocks, most), kBlock, kSharedBytes<C, GenericBackwardShared<C>>, stream, p, plan, again,
                  blocks);
  };
  const char* error = nullptr;
  if (p.grad_query.data || again.writes_mask) {
    again.panels = p.grad_query.data ? panels_of(p.head_dim, C::kPanel) : 1;
    error = run(sm90_grad_query_again_kernel<C>, kv_heads * tiles_per_kv_group(again.tiling) * again.panels);
  }
  if (!error && (p.grad_key.data || p.grad_value.data)) {
    again.panels = panels_of(max(p.head_dim, p.value_dim), C::kPanel);
    error = run(sm90_grad_key_value_again_kernel<C>, kv_heads * ceil_div(p.key_length, C::kSide) * again.panels);
  }
  return error;
}

}  // namespace
}  // namespace scaledot
