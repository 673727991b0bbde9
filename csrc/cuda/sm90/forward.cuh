// The forward pass on Hopper. The formulas are those of generic/forward.cuh; this is who does what when:
//
//   producer     draws tiles of rows; for each, copies Q, and K and V tile by tile into two stages each
//                (packed sequences: another thread draws the tiles; quantised: three more warps widen K and V)
//   consumers    64 rows each:   S = Q K_0^T,  softmax
//                                for j = 1 ..:  S = Q K_j^T and O += P V_(j-1) on the tensor cores,
//                                               softmax of S while O is still being computed,  O = O exp(m - m')
//                                O += P V_last,  output = O / (l (1 - dropout_p)),  lse = m + log l
//
// Clusters of two blocks share keys and values where the second-level cache would be too slow for each block to read
// all of them: each block copies half of every tile to both.
//
// Blocks are persistent: there are as many as multiprocessors. Consumers take turns at the tensor cores (kPingPong):
// while one issues its products, the other computes its softmax.
// Shah et al., "FlashAttention-3", 2024.
#pragma once

#include "cuda/sm90/forward_consumer.cuh"
#include "cuda/sm90/forward_producer.cuh"

namespace scaledot {
namespace {

template <class C>
SCALEDOT_KERNEL(C::kThreads)
sm90_forward_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM Sm90ForwardPlan plan) {
#if SCALEDOT_SM90
  auto& shared = *static_cast<Sm90ForwardShared<C>*>(shared_memory());
  if constexpr (C::kPacked) copy_problem_to_slots<C>(p, shared);
  init_forward_barriers<C>(shared);
  if (warpgroup_index() == 0) {
    dealloc_registers<C::kProducerRegisters>();
    if (thread_index() < (C::kPacked ? kWarpSize : 1)) produce_forward<C>(p, plan, shared);
    if constexpr (C::kPacked && !C::kQuantised)
      if (thread_index() == kWarpSize) draw_packed_tiles<C>(p, plan, shared);
    if constexpr (C::kQuantised)
      if (thread_index() >= kFirstWidenWarp * kWarpSize) widen_forward<C>(shared);
  } else {
    alloc_registers<C::kConsumerRegisters>();
    consume_forward<C>(p, plan, shared);
  }
  if constexpr (C::kCluster > 1) cluster_barrier();  // the other blocks may still use this one's shared memory
#endif
}

}  // namespace
}  // namespace scaledot
