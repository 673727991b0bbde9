// The host side of the backward for sm_90, for one storage type: configuration, plan and workspace, and the launches.
#pragma once

#include "cuda/generic/backward_launch.cuh"
#include "cuda/generic/generic.h"
#include "cuda/sm90/backward.cuh"
#include "cuda/sm90/backward_delta.cuh"
#include "cuda/sm90/backward_finish.cuh"
#include "cuda/sm90/backward_lse.cuh"
#include "cuda/sm90/sm90.h"

namespace scaledot {
namespace {

// Whether some score of the problem may be masked. The last tile of a packed sequence may have rows of the next one.
inline bool masks_anything(const Problem& p) {
  return is_packed(p) || p.attn_mask.data || tile_kind(p, {0, p.query_length}, {0, p.key_length}) != TileKind::full;
}

// The kernel for sm_90 writes grad_mask if each of its elements belongs to one score. Otherwise grad_mask is a sum, and
// the generic kernels compute it, and only it, in a separate pass.
inline Problem without_summed_mask(const Problem& p) {
  Problem rest = p;
  if (sums_mask(p)) rest.grad_mask = {};
  return rest;
}
inline Problem only_summed_mask(const Problem& p) {
  Problem only = p;
  only.grad_query = only.grad_key = only.grad_value = {};
  return only;
}

// Calls body with the configuration for a problem.
template <class Storage, class Body>
auto with_sm90_backward_config(const Problem& p, const Body& body) {
  return with_padded_dims(p, [&](auto dim, auto value_dim) {
    if (is_packed(p)) return body(Sm90BackwardConfig<Storage, dim.value, value_dim.value, false, true>{});
    return needs_general_backward(p) ? body(Sm90BackwardConfig<Storage, dim.value, value_dim.value, true>{})
                                     : body(Sm90BackwardConfig<Storage, dim.value, value_dim.value, false>{});
  });
}

template <class C>
Sm90BackwardPlan plan_sm90_backward(const Problem& p, Arena& arena) {
  Sm90BackwardPlan plan = {};
  plan.rows.delta = take<float>(arena, row_count(p));
  plan.rows.lse = take<SplitLse<float>>(arena, row_count(p));
  plan.imprecise = take<int>(arena, kMaxMemoryBlocks);
  plan.row_tile_rows = C::kRows, plan.grad_query_cols = C::kGradQueryCols;
  plan.grad_query_parts = C::kGradQueryParts;
  plan.row_tiles = ceil_div(p.query_length, C::kRows);
  plan.key_tiles = ceil_div(p.key_length, C::kKeys);
  if (C::kPacked) {
    plan.row_tiles = most_packed_tiles(p, p.packed.total_q, p.query_length, C::kRows);
    plan.key_tiles = most_packed_tiles(p, p.packed.total_k, p.key_length, C::kKeys);
    plan.row_starts = take<int>(arena, p.batch + 1);
    plan.key_starts = take<int>(arena, p.batch + 1);
  }
  const int64_t tiles = with_all_rows(p).batch * p.heads * plan.row_tiles;
  plan.statistics = take<typename C::Statistics>(arena, tiles);
  if (C::kGeneral) plan.positions = take<Sm90RowPosition>(arena, tiles * C::kRows);
  if (p.grad_query.data) plan.grad_query = take<float>(arena, tiles * C::kRows * C::kPaddedDim);
  plan.semaphores = take<int>(arena, tiles * C::kGradQueryParts);
  plan.row_ranges = take<int>(arena, 2 * plan.key_tiles);
  plan.ticket = take<int>(arena, 1);
  if (masks_anything(p)) plan.has_nan = take<int>(arena, 1);
  return plan;
}

template <class Storage>
struct Sm90Backward {
  static int64_t workspace(const Problem& p) {
    return with_sm90_backward_config<Storage>(p, [&](auto config) {
      Arena arena = {nullptr, 0};
      plan_sm90_backward<decltype(config)>(p, arena);
      return arena.used + (sums_mask(p) ? generic_kernels(p.dtype).workspace(only_summed_mask(p), Pass::backward) : 0);
    });
  }

  static const char* run(const Problem& p, const DeviceExecutor& executor) {
    return with_sm90_backward_config<Storage>(p,
                                              [&](auto config) { return launch_all<decltype(config)>(p, executor); });
  }

  // The first two kernels: what the others need of each row.
  template <class C>
  static const char* prepare(const Problem& p, int64_t row_tiles, Sm90BackwardPlan& plan, DeviceStream stream) {
    // Each block counts the tiles of packed sequences: no more blocks than run at the same time.
    plan.imprecise_blocks =
        min(row_tiles, C::kPacked ? kDeltaBlocks * device_traits().multiprocessors : kMaxMemoryBlocks);
    const char* error =
        launch(sm90_delta_kernel<C>, plan.imprecise_blocks, kRowThreads, C::kPacked ? sizeof(Sm90DeltaShared) : 0,
               stream, p, plan, make_delta_tensors(with_all_rows(p)));
    return error ? error : launch_lse<typename C::Storage, C::kPacked>(p, plan, stream);
  }

  template <class C>
  static const char* launch_all(const Problem& given, const DeviceExecutor& executor) {
    const Problem p = without_summed_mask(given);
    Arena arena = {static_cast<char*>(executor.workspace), 0};
    Sm90BackwardPlan plan = plan_sm90_backward<C>(p, arena);
    const Problem all = with_all_rows(p);
    Sm90BackwardTensors from;
    const char* error = make_tma_tensor(all, p.query, p.heads, all.query_length, p.head_dim, C::kRows, from.query);
    if (!error) error = make_tma_tensor(all, p.key, p.kv_heads, all.key_length, p.head_dim, C::kKeys, from.key);
    if (!error) error = make_tma_tensor(all, p.value, p.kv_heads, all.key_length, p.value_dim, C::kKeys, from.value);
    if (!error)
      error = make_tma_tensor(all, p.grad_output, p.heads, all.query_length, p.value_dim, C::kRows, from.grad_output);
    const int64_t row_tiles = all.batch * p.heads * plan.row_tiles;
    const int64_t key_tiles = all.batch * p.kv_heads * plan.key_tiles;
    if (!error) error = prepare<C>(p, row_tiles, plan, executor.stream);
    if (!error && p.grad_mask.data && tile_kind(p, {0, p.query_length}, {0, p.key_length}) != TileKind::full)
      error = launch_clear_mask<float>(p, executor.stream);
    if (!error)
      error = launch(sm90_backward_kernel<C>, key_tiles, C::kThreads, sizeof(Sm90BackwardShared<C>), executor.stream, p,
                     plan, from);
    if (!error && (plan.grad_query || plan.has_nan))
      error = launch_finish<typename C::Storage, C::kPacked>(p, plan, row_tiles, executor.stream);
    // A part of the work that the generic kernels do. Their workspace follows this one's.
    if (!error && sums_mask(given))
      error = generic_kernels(p.dtype).backward(only_summed_mask(given), {executor.stream, take<char>(arena, 0)});
    return error;
  }

  static constexpr Sm90Kernels kernels = {workspace, run};
};

}  // namespace
}  // namespace scaledot
