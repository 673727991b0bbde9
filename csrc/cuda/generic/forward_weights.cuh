// The attention weights, if they are wanted: dropout(exp(S - m)) / (l (1 - dropout_p)), from the states (m, l) that the
// forward stored. A block computes one tile of scores; masked and skipped tiles are written too.
#pragma once

#include "cuda/generic/forward_plan.cuh"
#include "cuda/generic/softmax.cuh"

namespace scaledot {
namespace {

template <class C>
SCALEDOT_KERNEL((kThreads<C, kForwardColumnWarps>))
weights_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM GenericForwardPlan<typename C::T> plan) {
  using Storage = typename C::Storage;
  using T = typename C::T;
  using L = ScoreLayout<C, kForwardColumnWarps>;
  using Stage = PanelStage<C, kThreads<C, kForwardColumnWarps>>;
  auto& shared = *static_cast<GenericScoresShared<C>*>(shared_memory());
  const int64_t key_tiles = ceil_div(p.key_length, C::kSide);
  const QueryTask task = query_task(block_index() / key_tiles, plan.tiling, 1, 1);
  const QueryTile tile = query_tile(p, plan.tiling, task.batch_kv_head, task.tile);
  const Range keys = key_tile(p, block_index() % key_tiles, C::kSide);
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
    const RowState<T> state = global_load(plan.states + row_number(p, tile, row));
    const T inverse = normaliser(state) * options.dropout_scale;
    const uint32_t kept = options.drops ? kept_bits<L>(p, tile, row, keys) : ~uint32_t(0);
    Storage* weights = at<Storage>(p, p.weights, tile.batch, row.head) + row.i * p.weights.row_stride;
#pragma unroll
    for (int n = 0; n < L::kTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int64_t col = keys.begin + L::key(n, j);
        if (col >= keys.end) continue;
        const T weight = weight_exp<C>(rounded_subtract(s[n][2 * half + j], shift(state.maximum))) * inverse;
        const T dropped = kept >> (2 * n + j) & 1 ? weight : weight * T(0);  // NaN stays NaN
        Storage x;
        narrow(masked >> (4 * n + 2 * half + j) & 1 ? T(0) : dropped, x);
        global_store(weights + col * p.weights.col_stride, x);
      }
  }
}

}  // namespace
}  // namespace scaledot
