// The forward pass on Hopper. The formulas are those of generic/forward.cuh; here is who does what when.
//
//   producer     draws tiles of rows; for each copies Q, and K and V tile by tile into two stages each
//   consumers    64 rows each:   S = Q K_0^T,  softmax
//                                for j = 1 ..:  S = Q K_j^T and O += P V_(j-1) on the tensor cores,
//                                               softmax of S while O is still being computed,  O = O exp(m - m')
//                                O += P V_last,  output = O / (l (1 - dropout_p)),  lse = m + log l
// Consumers take turns (kTakesTurns): while one issues its products, another computes its softmax.
// Shah et al., "FlashAttention-3", 2024.
#pragma once

#include "core/arena.h"
#include "cuda/kernel.h"
#include "cuda/sm90/forward_consumer.cuh"
#include "cuda/sm90/forward_producer.cuh"

namespace scaledot {
namespace {

template <class C>
SCALEDOT_KERNEL(C::kThreads)
sm90_forward_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM Sm90ForwardPlan plan) {
#if SCALEDOT_SM90
  auto& shared = *static_cast<Sm90ForwardShared<C>*>(shared_memory());
  make_barriers<C>(shared);
  if (warpgroup_index() == 0) {
    give_registers<C::kProducerRegisters>();
    if (thread_index() == 0) produce<C>(p, plan, shared);
  } else {
    take_registers<C::kConsumerRegisters>();
    consume<C>(p, plan, shared);
  }
#endif
}

// ---------------------------------------------------------------------------------------------------- host
// The plan without tensor maps, and the workspace that it takes.
template <class C>
Sm90ForwardPlan plan_sm90_forward(const Problem& p, Arena& arena) {
  Sm90ForwardPlan plan = {};
  plan.scalars = scalars_of<C>(p);
  plan.order = tile_order(p, C::kRows);
  plan.tiles = plan.order.planes * plan.order.row_tiles;
  plan.next_tile = take<int>(arena, 1);
  const bool by_position = tile_kind(p, {0, p.query_length}, {0, p.key_length}) != TileKind::full;
  if (by_position || p.attn_mask.data || p.alibi_slopes.data)
    plan.finite = take<uint8_t>(arena, p.batch * p.kv_heads * ceil_div(p.key_length, C::kKeys));
  if (p.weights.data) plan.states = take<RowState<float>>(arena, p.batch * p.heads * p.query_length);
  return plan;
}

template <class C>
const char* run_sm90_forward(const Problem& p, const DeviceExecutor& executor,
                             const char* (*weights)(const Problem&, const RowState<float>*, DeviceStream)) {
  Arena arena = {static_cast<char*>(executor.workspace), 0};
  Sm90ForwardPlan plan = plan_sm90_forward<C>(p, arena);
  if (plan.tiles == 0) return nullptr;
  const char* error = make_source(p, p.query, p.heads, p.query_length, p.head_dim, kConsumerRows, plan.query);
  if (!error) error = make_source(p, p.key, p.kv_heads, p.key_length, p.head_dim, C::kKeys, plan.key);
  if (!error) error = make_source(p, p.value, p.kv_heads, p.key_length, p.value_dim, C::kKeys, plan.value);
  if (!error) error = make_source(p, p.output, p.heads, p.query_length, p.value_dim, kConsumerRows, plan.output);
  if (!error) error = clear_bytes(plan.next_tile, sizeof(int), executor.stream);
  if (!error && plan.finite)
    error = launch(finite_kernel<typename C::Number>, p.batch * p.kv_heads * ceil_div(p.key_length, C::kKeys),
                   kFiniteThreads, 0, executor.stream, p, C::kKeys, const_cast<uint8_t*>(plan.finite));
  if (!error)
    error = launch(sm90_forward_kernel<C>, min<int64_t>(plan.tiles, device_traits().multiprocessors), C::kThreads,
                   sizeof(Sm90ForwardShared<C>), executor.stream, p, plan);
  if (!error && p.weights.data) error = weights(p, plan.states, executor.stream);
  return error;
}

}  // namespace
}  // namespace scaledot
