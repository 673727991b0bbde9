// The host side of the forward: its plan and workspace, and the launches.
#pragma once

#include "core/arena.h"
#include "cuda/generic/forward.cuh"
#include "cuda/generic/forward_merge.cuh"
#include "cuda/generic/forward_weights.cuh"
#include "cuda/kernel.h"
#include "cuda/ptx/launch.h"

namespace scaledot {
namespace {

template <class C>
GenericForwardPlan<typename C::T> plan_forward(const Problem& p, Arena& arena) {
  using T = typename C::T;
  GenericForwardPlan<T> plan = {};
  plan.tiling = query_tiling(p, C::kRows, true);
  plan.panels = max<int64_t>(panels_of(p.value_dim, C::kPanel), 1);
  const int64_t blocks = p.batch * p.kv_heads * tiles_per_kv_group(plan.tiling) * plan.panels;
  const int64_t tiles = ceil_div(p.key_length, C::kKeys), target = C::kDecode ? kDecodeBlocks : kTargetBlocks;
  int64_t wanted = min(ceil_div(target, max<int64_t>(blocks, 1)), tiles / kMinSplitTiles);
  if (p.packed.num_splits > 0) wanted = min(wanted, p.packed.num_splits);
  plan.split_tiles = ceil_div(tiles, max<int64_t>(wanted, 1));
  plan.splits = max<int64_t>(ceil_div(tiles, max<int64_t>(plan.split_tiles, 1)), 1);
  if (p.weights.data) plan.states = take<RowState<T>>(arena, row_count(p));
  if (plan.splits > 1) {
    plan.tile_rows = C::kRows;
    plan.merge_slices = min(ceil_div(kMergeBlocks, max<int64_t>(blocks, 1)), plan.tiling.heads * plan.tiling.rows);
    plan.partials = take<T>(arena, blocks * plan.splits * C::kRows * C::kPanel);
    plan.partial_states = take<RowState<T>>(arena, blocks * plan.splits * C::kRows);
  }
  return plan;
}

// `states`: of every row.
template <class Storage>
const char* run_weights(const Problem& p, RowState<typename Compute<Storage>::type>* states, DeviceStream stream) {
  using C = ScoresConfig<Storage>;
  const bool mean = averages_weights(p);
  GenericForwardPlan<typename C::T> plan = {};
  plan.tiling = query_tiling(p, C::kSide, !mean);
  plan.states = states;
  const int64_t tiles = mean ? p.batch * plan.tiling.row_tiles : p.batch * p.kv_heads * tiles_per_kv_group(plan.tiling);
  return launch(mean ? mean_weights_kernel<C> : weights_kernel<C>, tiles * ceil_div(p.key_length, C::kSide),
                kThreads<C, kForwardColumnWarps>, sizeof(GenericScoresShared<C>), stream, p, plan);
}

template <class C>
const char* run_forward(const Problem& p, const DeviceExecutor& executor) {
  Arena arena = {static_cast<char*>(executor.workspace), 0};
  const GenericForwardPlan<typename C::T> plan = plan_forward<C>(p, arena);
  const int64_t tiles = p.batch * p.kv_heads * tiles_per_kv_group(plan.tiling);
  using Shared = typename KeyStages<C, kThreads<C, kForwardColumnWarps>>::Shared;
  const char* error = launch(forward_kernel<C>, tiles * plan.panels * plan.splits, kThreads<C, kForwardColumnWarps>,
                             kSharedBytes<C, Shared>, executor.stream, p, plan);
  if (!error && plan.splits > 1)
    error = launch(merge_kernel<typename C::Merged>, tiles * plan.panels * plan.merge_slices, kMergeThreads,
                   merge_shared_bytes<typename C::Merged>(plan.splits), executor.stream, p, plan);
  if constexpr (!C::kPacked)
    if (!error && p.weights.data) error = run_weights<typename C::Storage>(p, plan.states, executor.stream);
  return error;
}

// Calls body with C, or with Decode<C> for few rows in 16 bits.
template <class C, class Body>
auto with_decode(const Problem& p, const Body& body) {
  if constexpr (sizeof(typename C::Storage) == 2)
    if (is_decode(p)) return body(Decode<C>{});
  return body(C{});
}
template <class C>
const char* run_forward_of(const Problem& p, const DeviceExecutor& executor) {
  return with_decode<C>(p, [&](auto config) { return run_forward<decltype(config)>(p, executor); });
}

}  // namespace
}  // namespace scaledot
