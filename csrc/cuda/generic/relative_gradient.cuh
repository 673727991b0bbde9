// The gradient of relative_bias: dS, summed in a fixed order over the scores that have the same distance.
//
// A block has one query head of a stored batch entry, and a slice of its rows, in all batch entries that share the
// entry. It computes dS of one tile after the other, sums the tile's diagonals, and adds them to its own sums in
// global memory. A second kernel adds up the sums of the blocks. With packed sequences a batch entry is a sequence.
#pragma once

#include "cuda/generic/mask_gradient.cuh"
#include "cuda/generic/packed.cuh"

namespace scaledot {
namespace {

// The sum of diagonals[begin] to diagonals[end - 1], for all lanes of a warp.
template <class T>
SCALEDOT_DEVICE T sum_of_diagonals(const T* diagonals, int64_t begin, int64_t end) {
  T sum = T(0);
  for (int64_t k = begin + lane_index(); k < end; k += kWarpSize) sum += shared_load(diagonals + k);
#pragma unroll
  for (int mask = 1; mask < kWarpSize; mask *= 2) sum += shuffle_xor(sum, mask);
  return sum;
}

template <class T>
SCALEDOT_DEVICE void add_to(T* sum, T x) {
  global_store(sum, global_load(sum) + x);
}

// Adds dS of a tile, which is in `scores`, to the sums of the block.
template <class C, class T>
SCALEDOT_DEVICE void add_tile_diagonals(const Problem& p, Range rows, Range keys, const T* scores, T* diagonals,
                                        T* sums) {
  const int row_count = int(count(rows)), key_count = int(count(keys)), size = row_count + key_count - 1;
  for (int k = thread_index(); k < size; k += kThreads<C, kBackwardColumnWarps>) {
    T sum = T(0);
    // Row i has its key j on diagonal j - i + row_count - 1.
    for (int i = max(row_count - 1 - k, 0); i < min(row_count, size - k); ++i)
      sum += shared_load(scores + i * C::kSide + k + i - row_count + 1);
    shared_store(diagonals + k, sum);
  }
  barrier();
  const auto [low, high] = p.relative_range;
  const int64_t first = keys.begin - (rows.end - 1 + p.position.diagonal);
  // The diagonals between the first and the last entry, each of which several diagonals may have.
  const int64_t begin = min<int64_t>(max<int64_t>(low + 1 - first, 0), size);
  const int64_t end = max(min<int64_t>(high - first, size), begin);
  for (int64_t k = begin + thread_index(); k < end; k += kThreads<C, kBackwardColumnWarps>)
    add_to(sums + first + k - low, shared_load(diagonals + k));
  if (warp_index() == 0) {
    const T below = sum_of_diagonals(diagonals, 0, begin), above = sum_of_diagonals(diagonals, end, size);
    if (lane_index() == 0) {
      if (begin > 0) add_to(sums, below);
      if (end < size) add_to(sums + high - low, above);
    }
  }
}

template <class C>
SCALEDOT_KERNEL((kThreads<C, kBackwardColumnWarps>))
grad_relative_kernel(SCALEDOT_PARAM Problem given, SCALEDOT_PARAM GenericBackwardPlan<typename C::T> plan) {
  using T = typename C::T;
  using L = ScoreLayout<C, kBackwardColumnWarps>;
  constexpr int kBlock = kThreads<C, kBackwardColumnWarps>;
  auto& shared = *static_cast<GenericRelativeShared<C>*>(shared_memory());
  const int64_t slice = block_index() % plan.relative_slices, stored_head = block_index() / plan.relative_slices;
  const int64_t head = stored_head % given.heads, own_batch = stored_head / given.heads;
  T* sums = plan.relative_partials + block_index() * plan.relative_entries;
  for (int64_t e = thread_index(); e < plan.relative_entries; e += kBlock) global_store(sums + e, T(0));

  const int64_t row_tiles = plan.relative_tiling.row_tiles;
  const int64_t all = given.batch / plan.relative_batches * row_tiles;
  BackwardStages<C> stages = backward_stages<C>(shared);
  for (int64_t index = all * slice / plan.relative_slices; index < all * (slice + 1) / plan.relative_slices; ++index) {
    const int64_t batch = batch_of_stored(given, given.grad_relative_bias, own_batch, index / row_tiles);
    int64_t pair = batch * given.kv_heads + head / (given.heads / given.kv_heads);
    barrier();  // the problem and the tile before this one have been read
    const Problem& p = problem_of_block<C, kBlock>(given, pair, &shared + 1);
    const int64_t row = index % row_tiles * plan.relative_tiling.rows;
    const StackedTile tile = {C::kPacked ? 0 : int(batch),
                              int(pair % given.kv_heads),
                              int(head),
                              1,
                              {row, min(row + plan.relative_tiling.rows, p.query_length)}};
    if (is_empty<C>(tile)) continue;
    stages.set_query_rows(p, tile);
    const Range range = key_tiles_of(key_range(p, tile.rows), C::kSide);
    for (int64_t t = range.begin; t < range.end; ++t) {
      const Range keys = key_tile(p, t, C::kSide);
      if (blocks_skip<C>(p, tile, keys)) continue;
      const ScoreOptions<T> options = score_options<C>(p, tile, keys);
      stages.set_keys(p, tile.batch, tile.kv_head, keys);
      T s[L::kTiles][4], dp[L::kTiles][4];
      score_products<C>(p, stages, s, dp);
      score_gradients<C, true>(p, plan, tile, keys, options, false, s, dp);
      barrier();  // the diagonals of the tile before this one have been read
#pragma unroll
      for (int n = 0; n < L::kTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) shared_store(shared.sums + L::row(e / 2) * C::kSide + L::key(n, e % 2), dp[n][e]);
      barrier();
      add_tile_diagonals<C>(p, tile.rows, keys, shared.sums, shared.diagonals, sums);
    }
  }
}

// Adds up the sums of the blocks: those of all slices, and of all heads if they share the bias.
template <class T>
SCALEDOT_KERNEL(kMemoryThreads)
sum_relative_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM GenericBackwardPlan<T> plan) {
  const TensorView& gradient = p.grad_relative_bias;
  const int64_t stored_heads = gradient.head_stride ? p.heads : 1, entries = plan.relative_entries;
  const int64_t parts = p.heads / stored_heads * plan.relative_slices;
  for (int64_t k = block_index() * kMemoryThreads + thread_index(); k < plan.relative_batches * stored_heads * entries;
       k += block_count() * kMemoryThreads) {
    const int64_t row = k / entries, entry = k % entries;
    T sum = T(0);
    for (int64_t part = 0; part < parts; ++part)
      sum += global_load(plan.relative_partials + (row * parts + part) * entries + entry);
    const int64_t start = offset(p, gradient, batch_of_stored(p, gradient, row / stored_heads, 0), row % stored_heads);
    global_store(static_cast<T*>(gradient.data) + start + entry, sum);
  }
}

}  // namespace
}  // namespace scaledot
