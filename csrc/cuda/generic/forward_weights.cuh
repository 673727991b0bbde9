// The attention weights, if they are wanted: dropout(exp(S - m)) / (l (1 - dropout_p)), from the states (m, l) that the
// forward stored. A block computes one tile of scores; masked and skipped tiles are written too.
//
// For the mean over the heads, a block adds up the same tile of all query heads, in order, in registers.
#pragma once

#include "cuda/generic/forward_plan.cuh"
#include "cuda/generic/softmax.cuh"
#include "cuda/store_rows.cuh"

namespace scaledot {
namespace {

// The weights of a tile that the thread holds, in the places of their scores.
template <class C>
SCALEDOT_DEVICE void tile_weights(const Problem& p, const RowState<typename C::T>* states, const StackedTile& tile,
                                  Range keys, GenericScoresShared<C>& shared,
                                  typename C::T (&s)[ScoreLayout<C, kForwardColumnWarps>::kTiles][4]) {
  using Storage = typename C::Storage;
  using T = typename C::T;
  using L = ScoreLayout<C, kForwardColumnWarps>;
  using Stage = PanelStage<C, kThreads<C, kForwardColumnWarps>>;
  const ScoreOptions<T> options = score_options<C>(p, tile, keys);
  clear(s);
  if (kind_of_tile<C>(p, tile, keys) == TileKind::skip) return;  // all weights are 0
  Stage query = {shared.query, rows_of_tile<C>(p, p.query, tile, p.head_dim), -1};
  Stage key = {shared.key, rows_of_keys<C>(p, p.key, tile.batch, tile.kv_head, keys, p.head_dim), -1};
  bool pending = false;
  for (int c = 0; c < panels_of(p.head_dim, C::kPanel); ++c) {
    wait_for_panels(query, c, key, c, pending);
    multiply<ALayout::rows, BLayout::by_column>(
        s, SharedMatrix<Storage>{query.data + L::warp_row() * C::kPitch, C::kPitch},
        SharedMatrix<Storage>{key.data, C::kPitch}, panel_width(p.head_dim, c, C::kPanel), L::kTiles);
  }
  const uint32_t masked = finish_scores<C, kForwardColumnWarps>(p, tile, options, keys, s);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ThreadRow<T> row = thread_row<T>(p, tile, L::row(half), keys);
    const RowState<T> state = row.exists ? global_load(states + row_number(p, tile, row)) : empty_row<T>();
    const T base = shift(state.maximum), factor = normaliser(state) * options.dropout_scale;
    const uint32_t keep_mask = options.drops ? keep_mask_bits<L>(p, tile, row, keys) : ~uint32_t(0);
#pragma unroll
    for (int n = 0; n < L::kTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        T& x = s[n][2 * half + j];
        const T weight = weight_exp<C>(rounded_subtract(x, base)) * factor;
        const T dropped = keep_mask >> (2 * n + j) & 1 ? weight : weight * T(0);  // NaN stays NaN
        x = masked >> (4 * n + 2 * half + j) & 1 ? T(0) : dropped;
      }
  }
}

// Stores them.
template <class C>
SCALEDOT_DEVICE void store_weights(const Problem& p, const StackedTile& tile, Range keys,
                                   const typename C::T (&s)[ScoreLayout<C, kForwardColumnWarps>::kTiles][4]) {
  using Storage = typename C::Storage;
  using L = ScoreLayout<C, kForwardColumnWarps>;
  const TensorView& view = p.weights;
  Storage* to[2];  // of each row; nullptr if it does not exist
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ThreadRow<typename C::T> row = thread_row<typename C::T>(p, tile, L::row(half), keys);
    to[half] = row.exists ? element_ptr<Storage>(p, view, tile.batch, row.head) + row.i * view.row_stride +
                                keys.begin * view.col_stride
                          : nullptr;
  }
  if constexpr (sizeof(Storage) == 2) {
    const RowPair<Storage> rows = {{to[0], to[1]}, view.col_stride, count(keys), stores_chunks(view, to, count(keys))};
    store_row_pair<L::kTiles>(rows, L::warp_key(), [&](int n, int half) {
      return narrow_pair(s[n][2 * half], s[n][2 * half + 1], Type<Storage>{});
    });
  } else {
#pragma unroll
    for (int n = 0; n < L::kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int k = L::key(n, e % 2);
        if (to[e / 2] && k < int(count(keys))) global_store(to[e / 2] + k * view.col_stride, Storage(s[n][e]));
      }
  }
}

template <class C>
SCALEDOT_KERNEL((kThreads<C, kForwardColumnWarps>))
weights_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM GenericForwardPlan<typename C::T> plan) {
  auto& shared = *static_cast<GenericScoresShared<C>*>(shared_memory());
  const int64_t key_tiles = ceil_div(p.key_length, C::kSide);
  const QueryTask task = query_task(block_index() / key_tiles, plan.tiling, 1, 1);
  const StackedTile tile = query_tile(p, plan.tiling, task.kv_group, task.tile);
  const Range keys = key_tile(p, block_index() % key_tiles, C::kSide);
  typename C::T s[ScoreLayout<C, kForwardColumnWarps>::kTiles][4];
  tile_weights<C>(p, plan.states, tile, keys, shared, s);
  store_weights<C>(p, tile, keys, s);
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
  T sum[L::kTiles][4], s[L::kTiles][4];
  clear(sum);
  for (int head = 0; head < int(p.heads); ++head) {
    tile.first_head = head, tile.kv_head = int(head / (p.heads / p.kv_heads));
    tile_weights<C>(p, plan.states, tile, keys, shared, s);
#pragma unroll
    for (int n = 0; n < L::kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[n][e] += s[n][e];
  }
#pragma unroll
  for (int n = 0; n < L::kTiles; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[n][e] /= T(p.heads);
  store_weights<C>(p, tile, keys, sum);
}

}  // namespace
}  // namespace scaledot
