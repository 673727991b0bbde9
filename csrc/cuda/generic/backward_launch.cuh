// The host side of the backward: its plan and workspace, and the launches.
#pragma once

#include "core/arena.h"
#include "cuda/generic/backward.cuh"
#include "cuda/generic/backward_prepare.cuh"
#include "cuda/generic/mask_gradient.cuh"
#include "cuda/generic/relative_gradient.cuh"
#include "cuda/kernel.h"
#include "cuda/ptx/launch.h"

namespace scaledot {
namespace {

template <class C>
void plan_relative_gradient(const Problem& p, GenericBackwardPlan<typename C::T>& plan, Arena& arena) {
  plan.relative_tiling = query_tiling(p, C::kSide, false);
  plan.relative_batches = stored_batches(p, p.grad_relative_bias);
  plan.relative_entries = relative_entries(p);
  const int64_t heads = max<int64_t>(plan.relative_batches * p.heads, 1);
  const int64_t row_tiles = p.batch * p.heads / heads * plan.relative_tiling.row_tiles;  // of a stored head
  plan.relative_slices = max<int64_t>(min(kTargetBlocks / heads, row_tiles), 1);
  plan.relative_partials = take<typename C::T>(arena, heads * plan.relative_slices * plan.relative_entries);
}

template <class C>
GenericBackwardPlan<typename C::T> plan_backward(const Problem& p, Arena& arena) {
  using T = typename C::T;
  GenericBackwardPlan<T> plan = {};
  const int64_t rows = row_count(p);
  plan.tiling = query_tiling(p, C::kSide, true);
  plan.rows.delta = take<T>(arena, rows);
  plan.rows.lse = take<SplitLse<T>>(arena, rows);
  if (p.grad_relative_bias.data) plan_relative_gradient<C>(p, plan, arena);
  if (!p.grad_mask.data) return plan;
  plan.writes_mask = !grad_mask_is_broadcast(p);
  if (plan.writes_mask) return plan;
  const TensorView& m = p.grad_mask;
  plan.mask_tiling = query_tiling(p, C::kSide, false);
  plan.mask_batches = stored_batches(p, m);
  plan.mask_heads = m.head_stride ? p.heads : 1;
  plan.mask_row_tiles = m.row_stride ? plan.mask_tiling.row_tiles : 1;
  plan.mask_key_tiles = m.col_stride ? ceil_div(p.key_length, C::kSide) : 1;
  plan.mask_extent = grad_mask_extent(p);
  const int64_t blocks = plan.mask_batches * plan.mask_heads * plan.mask_row_tiles * plan.mask_key_tiles;
  const int64_t scores = p.batch * p.heads * plan.mask_tiling.row_tiles * ceil_div(p.key_length, C::kSide);
  plan.mask_slices = max<int64_t>(min(kTargetBlocks, scores) / max<int64_t>(blocks, 1), 1);
  if (plan.mask_slices > 1) plan.mask_partials = take<T>(arena, plan.mask_slices * plan.mask_extent);
  return plan;
}

template <class T>
const char* launch_clear_mask(const Problem& p, DeviceStream stream) {
  const int64_t rows = p.batch * p.heads * p.query_length;
  return launch(clear_mask_kernel<T>, min(ceil_div(rows, kMemoryThreads / kWarpSize), kMaxMemoryBlocks), kMemoryThreads,
                0, stream, p);
}

template <class C>
const char* run_mask_gradient(const Problem& p, const GenericBackwardPlan<typename C::T>& plan, DeviceStream stream) {
  using T = typename C::T;
  const int64_t blocks =
      plan.mask_slices * plan.mask_batches * plan.mask_heads * plan.mask_row_tiles * plan.mask_key_tiles;
  const char* error = launch(grad_mask_kernel<C>, blocks, kThreads<C, kBackwardColumnWarps>,
                             sizeof(GenericMaskShared<C>), stream, p, plan);
  if (error || plan.mask_slices == 1) return error;
  return launch(sum_mask_kernel<T>, min(ceil_div(plan.mask_extent, kMemoryThreads), kMaxMemoryBlocks), kMemoryThreads,
                0, stream, p, plan);
}

template <class C>
const char* run_relative_gradient(const Problem& p, const GenericBackwardPlan<typename C::T>& plan,
                                  DeviceStream stream) {
  const char* error =
      launch(grad_relative_kernel<C>, plan.relative_batches * p.heads * plan.relative_slices,
             kThreads<C, kBackwardColumnWarps>, kSharedBytes<C, GenericRelativeShared<C>>, stream, p, plan);
  const int64_t elements = plan.relative_batches * (p.grad_relative_bias.head_stride ? p.heads : 1);
  if (error) return error;
  return launch(sum_relative_kernel<typename C::T>,
                min(ceil_div(elements * plan.relative_entries, kMemoryThreads), kMaxMemoryBlocks), kMemoryThreads, 0,
                stream, p, plan);
}

// Stores delta and lse of every row.
template <class C>
const char* run_prepare(const Problem& p, const PreparedRows<typename C::T>& rows, DeviceStream stream) {
  GenericBackwardPlan<typename C::T> plan = {};
  plan.rows = rows;
  plan.tiling = query_tiling(p, C::kSide, true);
  return launch(prepare_kernel<C>, p.batch * p.kv_heads * tiles_per_kv_group(plan.tiling),
                kThreads<C, kForwardColumnWarps>, kSharedBytes<C, GenericScoresShared<C>>, stream, p, plan);
}

template <class C>
const char* run_backward(const Problem& p, const DeviceExecutor& executor) {
  using T = typename C::T;
  Arena arena = {static_cast<char*>(executor.workspace), 0};
  GenericBackwardPlan<T> plan = plan_backward<C>(p, arena);
  const int64_t kv_heads = p.batch * p.kv_heads, tiles = kv_heads * tiles_per_kv_group(plan.tiling);
  constexpr int kBlock = kThreads<C, kBackwardColumnWarps>;
  const char* error = run_prepare<ScoresConfig<typename C::Storage, C::kPacked>>(p, plan.rows, executor.stream);
  const Range all_rows = {0, p.query_length}, all_keys = {0, p.key_length};
  if (!error && plan.writes_mask && !C::kPacked &&
      (has_blocks(p) || tile_kind(p, all_rows, all_keys) != TileKind::full))
    error = launch_clear_mask<T>(p, executor.stream);
  if (!error && (p.grad_query.data || plan.writes_mask)) {
    plan.panels = p.grad_query.data ? max<int64_t>(panels_of(p.head_dim, C::kPanel), 1) : 1;
    error = launch(grad_query_kernel<C>, tiles * plan.panels, kBlock, kSharedBytes<C, GenericBackwardShared<C>>,
                   executor.stream, p, plan);
  }
  if (!error && (p.grad_key.data || p.grad_value.data)) {
    plan.panels = max<int64_t>(panels_of(max(p.head_dim, p.value_dim), C::kPanel), 1);
    error = launch(grad_key_value_kernel<C>, kv_heads * ceil_div(p.key_length, C::kSide) * plan.panels, kBlock,
                   kSharedBytes<C, GenericBackwardShared<C>>, executor.stream, p, plan);
  }
  if (!error && p.grad_relative_bias.data) error = run_relative_gradient<C>(p, plan, executor.stream);
  if constexpr (!C::kPacked)
    if (!error && p.grad_mask.data && !plan.writes_mask) error = run_mask_gradient<C>(p, plan, executor.stream);
  return error;
}

}  // namespace
}  // namespace scaledot
