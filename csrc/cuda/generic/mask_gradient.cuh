// The gradient of a broadcast attn_mask: dS, summed in a fixed order over the dimensions that the mask is broadcast
// along.
//
// A block computes one tile of grad_mask. It visits the tiles of scores that this tile was added to and adds up dS in
// registers. If the mask is broadcast along rows or keys, it sums over them at the end. A mask with few elements gives
// few blocks. The tiles of scores are then divided into slices with separate sums, which a second kernel adds up.
#pragma once

#include "cuda/generic/backward_scores.cuh"

namespace scaledot {
namespace {

// The number of batch entries of a gradient that are stored separately.
SCALEDOT_FN int64_t stored_batches(const Problem& p, const TensorView& gradient) {
  int64_t batches = 1;
  for (int d = 0; d < p.batch_dims; ++d) batches *= gradient.batch_stride[d] ? p.batch_sizes[d] : 1;
  return batches;
}

// Batch entry number `shared` of those that share entry `own` of the gradient.
SCALEDOT_FN int64_t batch_of_stored(const Problem& p, const TensorView& gradient, int64_t own, int64_t shared) {
  int64_t batch = 0, step = 1;
  for (int d = p.batch_dims - 1; d >= 0; --d) {
    int64_t& from = gradient.batch_stride[d] ? own : shared;
    batch += from % p.batch_sizes[d] * step;
    from /= p.batch_sizes[d];
    step *= p.batch_sizes[d];
  }
  return batch;
}

template <class C>
SCALEDOT_KERNEL((kThreads<C, kBackwardColumnWarps>))
grad_mask_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM GenericBackwardPlan<typename C::T> plan) {
  using T = typename C::T;
  using L = ScoreLayout<C, kBackwardColumnWarps>;
  auto& shared = *static_cast<GenericMaskShared<C>*>(shared_memory());
  const TensorView& mask = p.grad_mask;
  const bool all_heads = !mask.head_stride, all_rows = !mask.row_stride, all_keys = !mask.col_stride;
  const int64_t row_tiles = plan.mask_tiling.row_tiles, key_tiles = ceil_div(p.key_length, C::kSide);

  int64_t rest = block_index();
  const auto take_digit = [&rest](int64_t base) {
    const int64_t digit = rest % base;
    rest /= base;
    return digit;
  };
  // Which tile of grad_mask (own_*), and which slice.
  const int64_t own_keys = take_digit(plan.mask_key_tiles), own_rows = take_digit(plan.mask_row_tiles);
  const int64_t own_head = take_digit(plan.mask_heads), own_batch = take_digit(plan.mask_batches), slice = rest;

  // The tiles of scores that share it.
  const int64_t shared_heads = all_heads ? p.heads : 1, shared_rows = all_rows ? row_tiles : 1;
  const int64_t shared_keys = all_keys ? key_tiles : 1;
  const int64_t all = p.batch / plan.mask_batches * shared_heads * shared_rows * shared_keys;
  T sums[L::kTiles][4];
  clear(sums);
  BackwardStages<C> stages = backward_stages<C>(shared);
  for (int64_t index = all * slice / plan.mask_slices; index < all * (slice + 1) / plan.mask_slices; ++index) {
    rest = index;
    const int64_t key_index = own_keys + take_digit(shared_keys), row_index = own_rows + take_digit(shared_rows);
    const int64_t head = own_head + take_digit(shared_heads), batch = batch_of_stored(p, mask, own_batch, rest);
    const int64_t row = row_index * plan.mask_tiling.rows;
    const StackedTile tile = {int(batch),
                              int(head / (p.heads / p.kv_heads)),
                              int(head),
                              1,
                              {row, min(row + plan.mask_tiling.rows, p.query_length)}};
    const Range keys = key_tile(p, key_index, C::kSide);
    if (kind_of_tile<C>(p, tile, keys) == TileKind::skip) continue;
    const ScoreOptions<T> options = score_options<C>(p, tile, keys);
    stages.set_query_rows(p, tile);
    stages.set_keys(p, tile.batch, tile.kv_head, keys);
    T s[L::kTiles][4], dp[L::kTiles][4];
    score_products<C>(p, stages, s, dp);
    score_gradients<C, true>(p, plan, tile, keys, options, false, s, dp);
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
  const int64_t start = offset(p, mask, batch_of_stored(p, mask, own_batch, 0), own_head);
  for (int k = thread_index(); k < rows * keys; k += kThreads<C, kBackwardColumnWarps>) {
    const int row = k / keys, key = k % keys;
    T sum = T(0);
    for (int r = row; r < row + add_rows; ++r)
      for (int c = key; c < key + add_keys; ++c) sum += shared_load(shared.sums + r * C::kSide + c);
    const int64_t element = start + (first_row + row) * mask.row_stride + (first_key + key) * mask.col_stride;
    if (plan.mask_partials)
      global_store(plan.mask_partials + slice * plan.mask_extent + element, sum);
    else
      global_store_element(mask.data, mask.dtype, element, sum);
  }
}

// For kernels that only read and write memory.
constexpr int kMemoryThreads = 256;
constexpr int64_t kMaxMemoryBlocks = 4096;

// Adds up the slices.

template <class T>
SCALEDOT_KERNEL(kMemoryThreads)
sum_mask_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM GenericBackwardPlan<T> plan) {
  for (int64_t k = block_index() * kMemoryThreads + thread_index(); k < plan.mask_extent;
       k += block_count() * kMemoryThreads) {
    T sum = T(0);
    for (int64_t slice = 0; slice < plan.mask_slices; ++slice)
      sum += global_load(plan.mask_partials + slice * plan.mask_extent + k);
    global_store_element(p.grad_mask.data, p.grad_mask.dtype, k, sum);
  }
}

// Sets grad_mask to 0, a warp a row: the other kernels do not visit tiles that positions or blocks skip.
template <class T>
SCALEDOT_KERNEL(kMemoryThreads)
clear_mask_kernel(SCALEDOT_PARAM Problem p) {
  const TensorView& mask = p.grad_mask;
  constexpr int kWarps = kMemoryThreads / kWarpSize;
  for (int64_t r = block_index() * kWarps + warp_index(); r < p.batch * p.heads * p.query_length;
       r += block_count() * kWarps) {
    const int64_t batch_head = r / p.query_length;
    const int64_t start =
        offset(p, mask, batch_head / p.heads, batch_head % p.heads) + r % p.query_length * mask.row_stride;
    for (int64_t j = lane_index(); j < p.key_length; j += kWarpSize)
      global_store_element(mask.data, mask.dtype, start + j * mask.col_stride, T(0));
  }
}

}  // namespace
}  // namespace scaledot
