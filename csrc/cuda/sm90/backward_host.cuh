// What problems the backward for sm_90 takes, its workspace, and its kernels one after the other.
#pragma once

#include "cuda/generic/generic.h"
#include "cuda/generic/mask_gradient.cuh"
#include "cuda/sm90/backward.cuh"
#include "cuda/sm90/backward.h"

namespace scaledot {
namespace {

#if defined(SCALEDOT_SM90A)
constexpr bool kHasSm90a = true;
#else
constexpr bool kHasSm90a = false;
#endif
constexpr int64_t kMaxLength90 = int64_t(1) << 30;  // positions are 32-bit numbers
constexpr int64_t kRowBlocks = 4096;                // of kernels that go through memory, at most

// nullptr, or why the copy engine cannot load this tensor.
inline const char* why_not_load(const Problem& p, const TensorView& view) {
  constexpr int64_t kNumbers = 16 / 2;
  if (reinterpret_cast<uintptr_t>(view.data) % 16 != 0 || view.col_stride != 1)
    return "the rows of a tensor are not 16-byte aligned and contiguous";
  const int64_t batch_stride = p.batch_dims > 0 ? view.batch_stride[0] : 0;
  for (int64_t stride : {view.row_stride, view.head_stride, batch_stride})
    if (stride % kNumbers != 0 || stride < 0 || 2 * stride >= kMaxTensorStride)
      return "a stride is not a multiple of 16 bytes below 2^40";
  return view.row_stride == 0 ? "a tensor is broadcast along its rows" : nullptr;
}

// The map of a tensor of `rows` rows a head, loaded in boxes of `box_rows`.
inline const char* make_source(const Problem& p, const TensorView& view, int64_t heads, int64_t rows, int64_t cols,
                               int box_rows, Source& made) {
  const int64_t batch_stride = p.batch_dims > 0 ? view.batch_stride[0] : 0;
  made.head_step = view.head_stride != 0, made.batch_step = batch_stride != 0;
  const auto bytes = [](int64_t stride) { return stride != 0 ? 2 * stride : 16; };
  const TensorShape shape = {view.data,
                             view.dtype,
                             {cols, rows, made.head_step ? heads : 1, made.batch_step ? p.batch : 1},
                             {2, bytes(view.row_stride), bytes(view.head_stride), bytes(batch_stride)},
                             {kSwizzleCols, box_rows, 1, 1}};
  return encode_tensor_map(made.map, shape);
}

// Whether some score that lies within the problem may be masked.
inline bool masks_anything(const Problem& p) {
  return p.attn_mask.data || tile_kind(p, {0, p.query_length}, {0, p.key_length}) != TileKind::full;
}

inline bool needs_general(const Problem& p) {
  return p.softcap > 0 || p.dropout_p > 0 || p.attn_mask.data || p.alibi_slopes.data || !positions_are_a_band(p);
}

// The gradient of attn_mask is dS. Where every element of it has one score, the kernel for sm_90 writes it; otherwise it is a sum, which
// the generic kernels make, in a pass of their own that computes nothing else.
inline bool sums_mask(const Problem& p) { return p.grad_mask.data && !owns_mask(p); }
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
using PrepareConfig = Config<typename C::Storage, smaller(C::kDim, 128)>;  // one that the generic kernels have

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
  static const char* why_not(const Problem& p) {
    if (!kHasSm90a) return "it was not compiled: TORCH_CUDA_ARCH_LIST lacks 9.0a";
    if (!p.grad_output.data) return "grad_output is absent";
    if (p.grad_weights.data) return "the weights have a gradient";
    if (sums_mask(p) && !p.grad_query.data && !p.grad_key.data && !p.grad_value.data)
      return "only the gradient of a broadcast attn_mask is asked for";
    if (p.batch * p.heads * p.query_length * p.key_length * p.head_dim * p.value_dim == 0) return "a tensor is empty";
    if (larger(p.head_dim, p.value_dim) > kSm90MaxDim) return "head_dim or value_dim is above 256";
    if (larger(p.query_length, p.key_length) > kMaxLength90) return "there are more than 2^30 queries or keys";
    if (p.batch_dims > 1) return "the batch dimensions do not lie evenly in memory";
    for (const TensorView* view : {&p.query, &p.key, &p.value, &p.grad_output})
      if (const char* reason = why_not_load(p, *view)) return reason;
    const int64_t key_tiles =
        with_backward_config<Storage>(p, [&](auto config) { return ceil_div(p.key_length, decltype(config)::kKeys); });
    const int64_t row_tiles = ceil_div(p.query_length, kBackwardRows);
    if (p.batch * (p.kv_heads * key_tiles + p.heads * row_tiles) > kMaxBlocks)
      return "it would take more than 2^31 - 1 blocks";
    return nullptr;
  }

  static int64_t workspace(const Problem& p) {
    return with_backward_config<Storage>(p, [&](auto config) {
      Arena arena = {nullptr, 0};
      plan_backward90<decltype(config)>(p, arena);
      // Of the generic kernels, which run one after the other.
      const auto of_generic = [&](const Problem& part) { return generic(p).workspace(part, Pass::backward); };
      return arena.used + larger(masks_anything(p) ? of_generic(without_summed_mask(p)) : 0,
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
      error = launch(pack_rows_kernel<C>, smaller(row_tiles, kRowBlocks), kRowThreads, 0, executor.stream, p, plan);
    if (!error && plan.wild)
      error = launch(find_wild_kernel<C>, row_tiles + key_tiles, kRowThreads, 0, executor.stream, p, plan);
    if (!error && p.grad_mask.data && tile_kind(p, {0, p.query_length}, {0, p.key_length}) != TileKind::full)
      error = launch_clear_mask(p, plan.rows, executor.stream);
    if (!error)
      error = launch(backward_kernel90<C>, key_tiles, C::kThreads, sizeof(BackwardShared90<C>), executor.stream, p,
                     plan, from);
    if (!error && plan.grad_query)
      error =
          launch(store_grad_query_kernel<C>, smaller(row_tiles, kRowBlocks), kRowThreads, 0, executor.stream, p, plan);
    // What is left to the generic kernels, whose workspace comes behind this one's.
    const DeviceExecutor behind = {executor.stream, take<char>(arena, 0)};
    if (!error && plan.wild) error = generic(p).backward_if(p, behind, plan.wild);
    if (!error && sums_mask(given)) error = generic(p).backward(only_mask(given), behind);
    return error;
  }

  static const GenericKernels& generic(const Problem& p) {
    return p.dtype == DType::bfloat16 ? kGenericBFloat16 : kGenericFloat16;
  }

  static constexpr Sm90Backward kernels = {why_not, workspace, run};
};

}  // namespace
}  // namespace scaledot
