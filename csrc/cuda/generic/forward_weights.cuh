// The attention weights, if they are wanted: dropout(exp(S - m)) / (l (1 - dropout_p)), from the states (m, l) that the
// forward stored. A block computes one tile of scores; masked and skipped tiles are written too.
//
// For the mean over the heads, a block adds up the same tile of all query heads, in order, in registers.
#pragma once

#include "cuda/generic/forward_plan.cuh"
#include "cuda/generic/softmax.cuh"

namespace scaledot {
namespace {

// Calls begin(half, row) for each row of the tile that the thread has weights of, and use(half, n, j, weight) for each
// of these.
template <class C, class Begin, class Use>
SCALEDOT_DEVICE void for_each_weight(const Problem& p, const RowState<typename C::T>* states, const StackedTile& tile,
                                     Range keys, GenericScoresShared<C>& shared, const Begin& begin, const Use& use) {
  using Storage = typename C::Storage;
  using T = typename C::T;
  using L = ScoreLayout<C, kForwardColumnWarps>;
  using Stage = PanelStage<C, kThreads<C, kForwardColumnWarps>>;
  const ScoreOptions<T> options = score_options<C>(p, tile, keys);
  T s[L::kTiles][4];
  clear(s);
  Stage query = {shared.query, rows_of_tile<C>(p, p.query, tile, p.head_dim), -1};
  Stage key = {shared.key, rows_of_keys<C>(p, p.key, tile.batch, tile.kv_head, keys, p.head_dim), -1};
  bool pending = false;
  const bool skipped = kind_of_tile<C>(p, tile, keys) == TileKind::skip;  // all weights are 0
  for (int c = 0; c < panels_of(p.head_dim, C::kPanel) && !skipped; ++c) {
    wait_for_panels(query, c, key, c, pending);
    multiply<ALayout::rows, BLayout::by_column>(
        s, SharedMatrix<Storage>{query.data + L::warp_row() * C::kPitch, C::kPitch},
        SharedMatrix<Storage>{key.data, C::kPitch}, panel_width(p.head_dim, c, C::kPanel), L::kTiles);
  }
  const uint32_t masked = finish_scores<C, kForwardColumnWarps>(p, tile, options, keys, s);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ThreadRow<T> row = thread_row<T>(p, tile, L::row(half), keys);
    if (!row.exists) continue;
    begin(half, row);
    const RowState<T> state = global_load(states + row_number(p, tile, row));
    const T inverse = normaliser(state) * options.dropout_scale;
    const uint32_t keep_mask = options.drops ? keep_mask_bits<L>(p, tile, row, keys) : ~uint32_t(0);
#pragma unroll
    for (int n = 0; n < L::kTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const T weight = weight_exp<C>(rounded_subtract(s[n][2 * half + j], shift(state.maximum))) * inverse;
        const T dropped = keep_mask >> (2 * n + j) & 1 ? weight : weight * T(0);  // NaN stays NaN
        use(half, n, j, masked >> (4 * n + 2 * half + j) & 1 ? T(0) : dropped);
      }
  }
}

// Where a thread's weights of a row are stored, from the tile's first key on.
template <class C>
struct WeightsRow {
  using Storage = typename C::Storage;
  Storage* first;
  int64_t col_stride;
  int keys;  // of the tile

  SCALEDOT_MEMBER void store(int n, int j, typename C::T weight) const {
    const int k = ScoreLayout<C, kForwardColumnWarps>::key(n, j);
    if (k >= keys) return;
    Storage x;
    narrow(weight, x);
    global_store(first + k * col_stride, x);
  }
};
template <class C>
SCALEDOT_DEVICE WeightsRow<C> weights_row(const Problem& p, const StackedTile& tile,
                                          const ThreadRow<typename C::T>& row, Range keys) {
  const TensorView& to = p.weights;
  return {element_ptr<typename C::Storage>(p, to, tile.batch, row.head) + row.i * to.row_stride +
              keys.begin * to.col_stride,
          to.col_stride, int(count(keys))};
}

template <class C>
SCALEDOT_KERNEL((kThreads<C, kForwardColumnWarps>))
weights_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM GenericForwardPlan<typename C::T> plan) {
  using T = typename C::T;
  auto& shared = *static_cast<GenericScoresShared<C>*>(shared_memory());
  const int64_t key_tiles = ceil_div(p.key_length, C::kSide);
  const QueryTask task = query_task(block_index() / key_tiles, plan.tiling, 1, 1);
  const StackedTile tile = query_tile(p, plan.tiling, task.kv_group, task.tile);
  const Range keys = key_tile(p, block_index() % key_tiles, C::kSide);
  WeightsRow<C> to;
  for_each_weight<C>(
      p, plan.states, tile, keys, shared,
      [&](int, const ThreadRow<T>& row) { to = weights_row<C>(p, tile, row, keys); },
      [&](int, int n, int j, T weight) { to.store(n, j, weight); });
}

// The mean over the heads. A tile of plan.tiling has the rows of one head.
template <class C>
SCALEDOT_KERNEL((kThreads<C, kForwardColumnWarps>))
mean_weights_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM GenericForwardPlan<typename C::T> plan) {
  using T = typename C::T;
  using L = ScoreLayout<C, kForwardColumnWarps>;
  auto& shared = *static_cast<GenericScoresShared<C>*>(shared_memory());
  const int64_t key_tiles = ceil_div(p.key_length, C::kSide), tile_number = block_index() / key_tiles;
  const int64_t batch = tile_number / plan.tiling.row_tiles, row_tile = tile_number % plan.tiling.row_tiles;
  const Range keys = key_tile(p, block_index() % key_tiles, C::kSide);
  StackedTile tile = query_tile(p, plan.tiling, batch * p.kv_heads, row_tile * plan.tiling.head_tiles);
  T sum[L::kTiles][4];
  clear(sum);
  for (int head = 0; head < int(p.heads); ++head) {
    tile.first_head = head, tile.kv_head = int(head / (p.heads / p.kv_heads));
    for_each_weight<C>(
        p, plan.states, tile, keys, shared, [](int, const ThreadRow<T>&) {},
        [&](int half, int n, int j, T weight) { sum[n][2 * half + j] += weight; });
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ThreadRow<T> row = thread_row<T>(p, tile, L::row(half), keys);
    if (!row.exists) continue;
    const WeightsRow<C> to = weights_row<C>(p, tile, row, keys);
#pragma unroll
    for (int n = 0; n < L::kTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) to.store(n, j, sum[n][2 * half + j] / T(p.heads));
  }
}

}  // namespace
}  // namespace scaledot
