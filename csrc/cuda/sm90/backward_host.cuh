// The workspace of the backward for sm_90, and its kernels one after the other.
#pragma once

#include "cuda/generic/generic.h"
#include "cuda/generic/mask_gradient.cuh"
#include "cuda/sm90/backward.cuh"
#include "cuda/sm90/sm90.h"

namespace scaledot {
namespace {

constexpr int64_t kRowBlocks = 4096;  // of kernels that go through memory, at most

// Whether some score that lies within the problem may be masked.
inline bool masks_anything(const Problem& p) {
  return p.attn_mask.data || tile_kind(p, {0, p.query_length}, {0, p.key_length}) != TileKind::full;
}

inline bool needs_general(const Problem& p) {
  return p.softcap > 0 || p.dropout_p > 0 || p.attn_mask.data || p.alibi_slopes.data || !positions_are_a_band(p);
}

// The kernel for sm_90 writes the gradient of a mask that has one element a score. Sums the generic kernels make, in a
// pass of their own that computes nothing else.
inline Problem without_summed_mask(const Problem& p) {
  Problem rest = p;
  if (sums_mask(p)) rest.grad_mask = {};
  return rest;
}
inline Problem only_mask(const Problem& p) {
  Problem only = p;
  only.grad_query = only.grad_key = only.grad_value = {};
  return only;
}

// Calls body with the configuration for a problem.
template <class Storage, class Body>
auto with_backward_config(const Problem& p, const Body& body) {
  return with_padded_dim(p, [&](auto dim) {
    return needs_general(p) ? body(BackwardConfig<Storage, dim.value, true>{})
                            : body(BackwardConfig<Storage, dim.value, false>{});
  });
}

template <class C>
using PrepareConfig = Config<typename C::Storage, min(C::kDim, 128)>;  // one that the generic kernels have

template <class C>
BackwardPlan90 plan_backward90(const Problem& p, Arena& arena) {
  BackwardPlan90 plan = {};
  const int64_t planes = p.batch * p.heads, rows = planes * p.query_length;
  plan.rows.tiling = tile_rows_of(p, PrepareConfig<C>::kSide, true);
  plan.rows.delta = take<float>(arena, rows);
  plan.rows.shift = take<RowShift<float>>(arena, rows);
  plan.row_tiles = ceil_div(p.query_length, C::kRows);
  plan.key_tiles = ceil_div(p.key_length, C::kKeys);
  const int64_t tiles = planes * plan.row_tiles;
  plan.terms = take<RowTerms>(arena, tiles * C::kRows);
  if (C::kGeneral) plan.positions = take<RowPosition>(arena, tiles * C::kRows);
  if (p.grad_query.data) plan.grad_query = take<float>(arena, tiles * C::kRows * C::kDim);
  plan.turns = take<int>(arena, tiles * C::kParts);
  plan.row_ranges = take<int>(arena, 2 * plan.key_tiles);
  plan.ticket = take<int>(arena, 1);
  if (masks_anything(p)) plan.wild = take<int>(arena, 1);
  return plan;
}

template <class Storage>
struct Backward90 {
  static int64_t workspace(const Problem& p) {
    return with_backward_config<Storage>(p, [&](auto config) {
      Arena arena = {nullptr, 0};
      plan_backward90<decltype(config)>(p, arena);
      // Of the generic kernels, which run one after the other.
      const auto of_generic = [&](const Problem& part) { return generic(p).workspace(part, Pass::backward); };
      return arena.used + max(masks_anything(p) ? of_generic(without_summed_mask(p)) : 0,
                                 sums_mask(p) ? of_generic(only_mask(p)) : 0);
    });
  }

  static const char* run(const Problem& p, const DeviceExecutor& executor) {
    return with_backward_config<Storage>(p, [&](auto config) { return launch_all<decltype(config)>(p, executor); });
  }

  template <class C>
  static const char* launch_all(const Problem& given, const DeviceExecutor& executor) {
    using G = PrepareConfig<C>;
    const Problem p = without_summed_mask(given);
    Arena arena = {static_cast<char*>(executor.workspace), 0};
    const BackwardPlan90 plan = plan_backward90<C>(p, arena);
    Sources from;
    const char* error = make_source(p, p.query, p.heads, p.query_length, p.head_dim, C::kRows, from.query);
    if (!error) error = make_source(p, p.key, p.kv_heads, p.key_length, p.head_dim, C::kKeys, from.key);
    if (!error) error = make_source(p, p.value, p.kv_heads, p.key_length, p.value_dim, C::kKeys, from.value);
    if (!error) error = make_source(p, p.grad_output, p.heads, p.query_length, p.value_dim, C::kRows, from.grad_output);
    const int64_t row_tiles = p.batch * p.heads * plan.row_tiles, key_tiles = p.batch * p.kv_heads * plan.key_tiles;
    if (!error)
      error = launch(prepare_kernel<G>, p.batch * p.kv_heads * tiles_per_plane(plan.rows.tiling),
                     kThreads<G, kForwardColumnWarps>, sizeof(ScoresShared<G>), executor.stream, p, plan.rows);
    if (!error)
      error = launch(pack_rows_kernel<C>, min(row_tiles, kRowBlocks), kRowThreads, 0, executor.stream, p, plan);
    if (!error && plan.wild)
      error = launch(find_wild_kernel<C>, row_tiles + key_tiles, kRowThreads, 0, executor.stream, p, plan);
    if (!error && p.grad_mask.data && tile_kind(p, {0, p.query_length}, {0, p.key_length}) != TileKind::full)
      error = launch_clear_mask(p, plan.rows, executor.stream);
    if (!error)
      error = launch(backward_kernel90<C>, key_tiles, C::kThreads, sizeof(BackwardShared90<C>), executor.stream, p,
                     plan, from);
    if (!error && plan.grad_query)
      error =
          launch(store_grad_query_kernel<C>, min(row_tiles, kRowBlocks), kRowThreads, 0, executor.stream, p, plan);
    // What is left to the generic kernels, whose workspace comes behind this one's.
    const DeviceExecutor behind = {executor.stream, take<char>(arena, 0)};
    if (!error && plan.wild) error = generic(p).backward_if(p, behind, plan.wild);
    if (!error && sums_mask(given)) error = generic(p).backward(only_mask(given), behind);
    return error;
  }

  static const GenericKernels& generic(const Problem& p) {
    return p.dtype == DType::bfloat16 ? kGenericBFloat16 : kGenericFloat16;
  }

  static constexpr Sm90Kernels kernels = {workspace, run};
};

}  // namespace
}  // namespace scaledot
