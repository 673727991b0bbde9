// dMask: dS, summed over everything that attn_mask is broadcast along, in order.
//
// A block makes one tile of grad_mask's own elements. It goes through the tiles of scores that this tile was added to, adding dS up
// in registers, and sums over rows and keys at the end where the mask has none of its own. A mask with few elements gives few
// blocks: then the scores are cut into slices, each with sums of its own, which a second kernel adds up.
#pragma once

#include "cuda/generic/backward.cuh"

namespace scaledot {
namespace {

// Batches that differ in the mask.
SCALEDOT_FN int64_t mask_batches(const Problem& p) {
  int64_t batches = 1;
  for (int d = 0; d < p.batch_dims; ++d) batches *= p.grad_mask.batch_stride[d] ? p.batch_sizes[d] : 1;
  return batches;
}

// One past the last element.
SCALEDOT_FN int64_t mask_extent(const Problem& p) {
  const TensorView& m = p.grad_mask;
  int64_t last =
      (p.heads - 1) * m.head_stride + (p.query_length - 1) * m.row_stride + (p.key_length - 1) * m.col_stride;
  for (int d = 0; d < p.batch_dims; ++d) last += (p.batch_sizes[d] - 1) * m.batch_stride[d];
  return last + 1;
}

// Number `shared` of the batches that have the mask's batch `own`.
SCALEDOT_FN int64_t batch_of_mask(const Problem& p, int64_t own, int64_t shared) {
  int64_t batch = 0, step = 1;
  for (int d = p.batch_dims - 1; d >= 0; --d) {
    int64_t& from = p.grad_mask.batch_stride[d] ? own : shared;
    batch += from % p.batch_sizes[d] * step;
    from /= p.batch_sizes[d];
    step *= p.batch_sizes[d];
  }
  return batch;
}

template <class C>
SCALEDOT_KERNEL((kThreads<C, kBackwardColumnWarps>))
grad_mask_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM BackwardPlan<typename C::T> plan) {
  using T = typename C::T;
  using L = Lane<C, kBackwardColumnWarps>;
  if (!is_wanted(plan)) return;
  auto& shared = *static_cast<MaskShared<C>*>(shared_memory());
  const TensorView& mask = p.grad_mask;
  const bool all_heads = !mask.head_stride, all_rows = !mask.row_stride, all_keys = !mask.col_stride;
  const int64_t row_tiles = plan.mask_tiling.row_tiles, key_tiles = ceil_div(p.key_length, C::kSide);

  int64_t rest = block_index();
  const auto take_digit = [&rest](int64_t base) {
    const int64_t digit = rest % base;
    rest /= base;
    return digit;
  };
  const int64_t own_keys = take_digit(plan.mask_key_tiles), own_rows = take_digit(plan.mask_row_tiles);
  const int64_t own_head = take_digit(plan.mask_heads), own_batch = take_digit(plan.mask_batches), slice = rest;

  const int64_t shared_heads = all_heads ? p.heads : 1, shared_rows = all_rows ? row_tiles : 1;
  const int64_t shared_keys = all_keys ? key_tiles : 1;
  const int64_t all = p.batch / plan.mask_batches * shared_heads * shared_rows * shared_keys;
  T sums[L::kTiles][4];
  clear(sums);
  TileStages<C> stages = tile_stages<C>(shared);
  for (int64_t index = all * slice / plan.mask_slices; index < all * (slice + 1) / plan.mask_slices; ++index) {
    rest = index;
    const int64_t key_index = own_keys + take_digit(shared_keys), row_index = own_rows + take_digit(shared_rows);
    const int64_t head = own_head + take_digit(shared_heads), batch = batch_of_mask(p, own_batch, rest);
    const int64_t row = row_index * plan.mask_tiling.rows;
    const RowTile tile = {int(batch),
                          int(head / (p.heads / p.kv_heads)),
                          int(head),
                          1,
                          {row, min(row + plan.mask_tiling.rows, p.query_length)}};
    const Range keys = key_tile(p, key_index, C::kSide);
    if (tile_kind(p, tile.rows, keys) == TileKind::skip) continue;
    const TileTerms<T> terms = tile_terms<C>(p, tile, keys);
    stages.point_to_rows(p, tile);
    stages.point_to_keys(p, tile.batch, tile.kv_head, keys);
    T s[L::kTiles][4], dp[L::kTiles][4];
    tile_products<C>(p, stages, s, dp);
    score_gradients<C, true>(p, plan, tile, keys, terms, false, s, dp);
#pragma unroll
    for (int n = 0; n < L::kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[n][e] += dp[n][e];
  }

#pragma unroll
  for (int n = 0; n < L::kTiles; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) shared_store(shared.sums + L::row(e / 2) * C::kSide + L::key(n, e % 2), sums[n][e]);
  barrier();
  const int64_t first_row = own_rows * plan.mask_tiling.rows, first_key = own_keys * C::kSide;
  const int rows = all_rows ? 1 : int(min<int64_t>(plan.mask_tiling.rows, p.query_length - first_row));
  const int keys = all_keys ? 1 : int(min<int64_t>(C::kSide, p.key_length - first_key));
  const int add_rows = all_rows ? C::kSide : 1, add_keys = all_keys ? C::kSide : 1;
  const int64_t start = offset(p, mask, batch_of_mask(p, own_batch, 0), own_head);
  for (int k = thread_index(); k < rows * keys; k += kThreads<C, kBackwardColumnWarps>) {
    const int row = k / keys, key = k % keys;
    T sum = T(0);
    for (int r = row; r < row + add_rows; ++r)
      for (int c = key; c < key + add_keys; ++c) sum += shared_load(shared.sums + r * C::kSide + c);
    const int64_t element = start + (first_row + row) * mask.row_stride + (first_key + key) * mask.col_stride;
    if (plan.mask_parts)
      global_store(plan.mask_parts + slice * plan.mask_extent + element, sum);
    else
      global_store_element(mask.data, mask.dtype, element, sum);
  }
}

constexpr int kPlainThreads = 256;      // of the kernels that only go through memory,
constexpr int64_t kPlainBlocks = 4096;  // and at most so many blocks of them

template <class T>
SCALEDOT_KERNEL(kPlainThreads)
sum_mask_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM BackwardPlan<T> plan) {
  if (!is_wanted(plan)) return;
  for (int64_t k = block_index() * kPlainThreads + thread_index(); k < plan.mask_extent;
       k += block_count() * kPlainThreads) {
    T sum = T(0);
    for (int64_t slice = 0; slice < plan.mask_slices; ++slice)
      sum += global_load(plan.mask_parts + slice * plan.mask_extent + k);
    global_store_element(p.grad_mask.data, p.grad_mask.dtype, k, sum);
  }
}

// Tiles that the position mask skips are never visited: their dMask is 0. A warp a row.
template <class T>
SCALEDOT_KERNEL(kPlainThreads)
clear_mask_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM BackwardPlan<T> plan) {
  if (!is_wanted(plan)) return;
  const TensorView& mask = p.grad_mask;
  constexpr int kWarps = kPlainThreads / kWarpSize;
  for (int64_t r = block_index() * kWarps + warp_index(); r < p.batch * p.heads * p.query_length;
       r += block_count() * kWarps) {
    const int64_t plane = r / p.query_length;
    const int64_t start = offset(p, mask, plane / p.heads, plane % p.heads) + r % p.query_length * mask.row_stride;
    for (int64_t j = lane_index(); j < p.key_length; j += kWarpSize)
      global_store_element(mask.data, mask.dtype, start + j * mask.col_stride, T(0));
  }
}

// ---------------------------------------------------------------------------------------------------- host
template <class C>
BackwardPlan<typename C::T> plan_backward(const Problem& p, Arena& arena) {
  using T = typename C::T;
  BackwardPlan<T> plan = {};
  const int64_t rows = row_count(p);
  plan.tiling = tile_rows_of(p, C::kSide, true);
  plan.delta = take<T>(arena, rows);
  plan.shift = take<RowShift<T>>(arena, rows);
  if (!p.grad_mask.data) return plan;
  plan.writes_mask = owns_mask(p);
  if (plan.writes_mask) return plan;
  const TensorView& m = p.grad_mask;
  plan.mask_tiling = tile_rows_of(p, C::kSide, false);
  plan.mask_batches = mask_batches(p);
  plan.mask_heads = m.head_stride ? p.heads : 1;
  plan.mask_row_tiles = m.row_stride ? plan.mask_tiling.row_tiles : 1;
  plan.mask_key_tiles = m.col_stride ? ceil_div(p.key_length, C::kSide) : 1;
  plan.mask_extent = mask_extent(p);
  const int64_t blocks = plan.mask_batches * plan.mask_heads * plan.mask_row_tiles * plan.mask_key_tiles;
  const int64_t scores = p.batch * p.heads * plan.mask_tiling.row_tiles * ceil_div(p.key_length, C::kSide);
  plan.mask_slices = max<int64_t>(min(kWantedBlocks, scores) / max<int64_t>(blocks, 1), 1);
  if (plan.mask_slices > 1) plan.mask_parts = take<T>(arena, plan.mask_slices * plan.mask_extent);
  return plan;
}

template <class T>
const char* launch_clear_mask(const Problem& p, const BackwardPlan<T>& plan, DeviceStream stream) {
  const int64_t rows = p.batch * p.heads * p.query_length;
  return launch(clear_mask_kernel<T>, min(ceil_div(rows, kPlainThreads / kWarpSize), kPlainBlocks), kPlainThreads,
                0, stream, p, plan);
}

template <class C>
const char* run_mask_gradient(const Problem& p, const BackwardPlan<typename C::T>& plan, DeviceStream stream) {
  using T = typename C::T;
  const int64_t blocks =
      plan.mask_slices * plan.mask_batches * plan.mask_heads * plan.mask_row_tiles * plan.mask_key_tiles;
  const char* error =
      launch(grad_mask_kernel<C>, blocks, kThreads<C, kBackwardColumnWarps>, sizeof(MaskShared<C>), stream, p, plan);
  if (error || plan.mask_slices == 1) return error;
  return launch(sum_mask_kernel<T>, min(ceil_div(plan.mask_extent, kPlainThreads), kPlainBlocks), kPlainThreads, 0,
                stream, p, plan);
}

template <class C>
const char* run_backward(const Problem& p, const DeviceExecutor& executor, const int* condition) {
  using T = typename C::T;
  Arena arena = {static_cast<char*>(executor.workspace), 0};
  BackwardPlan<T> plan = plan_backward<C>(p, arena);
  plan.condition = condition;
  const int64_t planes = p.batch * p.kv_heads, tiles = planes * tiles_per_plane(plan.tiling);
  constexpr int kBlock = kThreads<C, kBackwardColumnWarps>;
  const char* error = launch(prepare_kernel<C>, tiles, kThreads<C, kForwardColumnWarps>,
                             kSharedBytes<C, ScoresShared<C>>, executor.stream, p, plan);
  const Range all_rows = {0, p.query_length}, all_keys = {0, p.key_length};
  if (!error && plan.writes_mask && tile_kind(p, all_rows, all_keys) != TileKind::full)
    error = launch_clear_mask(p, plan, executor.stream);
  if (!error && (p.grad_query.data || plan.writes_mask)) {
    plan.panels = p.grad_query.data ? max<int64_t>(panels_of(p.head_dim, C::kPanel), 1) : 1;
    error = launch(grad_query_kernel<C>, tiles * plan.panels, kBlock, kSharedBytes<C, BackwardShared<C>>,
                   executor.stream, p, plan);
  }
  if (!error && (p.grad_key.data || p.grad_value.data)) {
    plan.panels = max<int64_t>(panels_of(max(p.head_dim, p.value_dim), C::kPanel), 1);
    error = launch(grad_key_value_kernel<C>, planes * ceil_div(p.key_length, C::kSide) * plan.panels, kBlock,
                   kSharedBytes<C, BackwardShared<C>>, executor.stream, p, plan);
  }
  if constexpr (!C::kPacked)
    if (!error && p.grad_mask.data && !plan.writes_mask) error = run_mask_gradient<C>(p, plan, executor.stream);
  return error;
}

}  // namespace
}  // namespace scaledot
