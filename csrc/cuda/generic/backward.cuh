// The backward pass. Nothing of size (query_length, key_length) is stored: the weights are recomputed.
//
//   delta, lse                                                 (backward_prepare.cuh)
//   S  = scores(Q K^T)     P  = exp(S - lse)      Pd = keep P / (1 - dropout_p)
//   dP = keep (dO V^T + dW) / (1 - dropout_p)
//   dS = P (dP - delta)    dX = slope dS          (slope: of the softcap; 0 where the mask replaced the score)
//   dQ = scale dX K        dK = scale dX^T Q      dV = Pd^T dO        dMask = dS (mask_gradient.cuh)
//   dBias[distance] = sum of dS                                (relative_gradient.cuh)
// Dao et al., "FlashAttention", 2022, appendix B.
//
// One kernel over tiles of rows computes dQ, another over tiles of keys dK and dV. Both recompute S and dP. That costs
// two more products than atomic additions to dQ would, and gives the same bits every time.
#pragma once

#include "cuda/generic/backward_scores.cuh"
#include "cuda/generic/forward_plan.cuh"

namespace scaledot {
namespace {

// The columns of a panel that a warp computes: its half of them.
template <class C>
struct PanelShare {
  static constexpr int kTiles = C::kPanel / 8 / kBackwardColumnWarps;
  int first;  // column
  int tiles;

  // column_warp = warp_index() / kRowWarps
  SCALEDOT_HOST_DEVICE constexpr PanelShare(int64_t cols, int panel, int column_warp) : first(0), tiles(0) {
    const int width = panel_width(cols, panel, C::kPanel);
    const int share = int(round_up(width, 16 * kBackwardColumnWarps)) / kBackwardColumnWarps;
    first = column_warp * share;
    tiles = max(min(share, width - first), 0) / 8;
  }
};

// The work of one block over a tile of keys.
struct KeyTask {
  int64_t kv_group, tile;
  int panel;
};
SCALEDOT_FN KeyTask key_task(int64_t block, int64_t key_tiles, int64_t panels) {
  return {block / panels / key_tiles, block / panels % key_tiles, int(block % panels)};
}

// Stores one of the thread's two rows (`half`) of a result: `factor` times the accumulators.
template <class C, class T>
SCALEDOT_DEVICE void store_sums(const Problem& p, const TensorView& view, int64_t batch, int64_t head, int64_t row,
                                int64_t cols, int panel, const PanelShare<C>& share, int half, T factor,
                                const T (&sums)[PanelShare<C>::kTiles][4]) {
  using Storage = typename C::Storage;
  Storage* to = element_ptr<Storage>(p, view, batch, head) + row * view.row_stride;
#pragma unroll
  for (int n = 0; n < PanelShare<C>::kTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t col = panel * C::kPanel + share.first + ScoreLayout<C, kBackwardColumnWarps>::column(n, j);
      if (n >= share.tiles || col >= cols) continue;
      Storage x;
      narrow(sums[n][2 * half + j] * factor, x);
      global_store(to + col * view.col_stride, x);
    }
}

// One panel of dQ for a tile of rows. Also dMask, if each of its elements belongs to one score only.
template <class C>
SCALEDOT_DEVICE void compute_grad_query(const Problem& given, const GenericBackwardPlan<typename C::T>& plan,
                                        int64_t block) {
  using Storage = typename C::Storage;
  using T = typename C::T;
  using L = ScoreLayout<C, kBackwardColumnWarps>;
  auto& shared = *static_cast<GenericBackwardShared<C>*>(shared_memory());
  QueryTask task = query_task(block, plan.tiling, plan.panels, 1);
  const Problem& p = problem_of_block<C, kThreads<C, kBackwardColumnWarps>>(given, task.kv_group, &shared + 1);
  const StackedTile tile = query_tile(p, plan.tiling, task.kv_group, task.tile);
  if (is_empty<C>(tile)) return;
  const bool wanted = p.grad_query.data && p.head_dim > 0, writes_mask = plan.writes_mask && task.panel == 0;
  const PanelShare<C> share(p.head_dim, task.panel, warp_index() / C::kRowWarps);
  BackwardStages<C> stages = backward_stages<C>(shared);
  stages.set_query_rows(p, tile);
  T sums[PanelShare<C>::kTiles][4];
  clear(sums);

  const Range range = key_tiles_of(key_range(p, tile.rows), C::kSide);
  for (int64_t t = range.begin; t < range.end; ++t) {
    const Range keys = key_tile(p, t, C::kSide);
    if (blocks_skip<C>(p, tile, keys)) continue;
    const ScoreOptions<T> options = score_options<C>(p, tile, keys);
    stages.set_keys(p, tile.batch, tile.kv_head, keys);
    T s[L::kTiles][4], dp[L::kTiles][4];
    score_products<C>(p, stages, s, dp);
    const ElementBits bits = score_gradients<C, false>(p, plan, tile, keys, options, writes_mask, s, dp);
    if (!wanted) continue;
    // dQ += dX K
    store_tile<C, kBackwardColumnWarps>(shared.scores, dp, bits.not_live, options.masks);
    wait_for_panels(stages.key, task.panel, stages.key, task.panel, stages.pending);
    bool finite = true;
    if (options.masks)
      finite = stages.key.finite();
    else
      barrier();
    multiply_weights<ALayout::rows>(
        finite, sums, SharedMatrix<Storage>{shared.scores + L::warp_row() * C::kScorePitch, C::kScorePitch},
        SharedMatrix<Storage>{stages.key.data + share.first, C::kPitch}, int(round_up(count(keys), 16)), share.tiles);
  }
  if (!wanted) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ThreadRow<T> row = thread_row<T>(p, tile, L::row(half), {0, 0});
    if (row.exists)
      store_sums<C>(p, p.grad_query, tile.batch, row.head, row.i, p.head_dim, task.panel, share, half, T(p.scale),
                    sums);
  }
}

template <class C>
SCALEDOT_KERNEL((kThreads<C, kBackwardColumnWarps>))
grad_query_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM GenericBackwardPlan<typename C::T> plan) {
  compute_grad_query<C>(p, plan, block_index());
}

// One panel of dK and of dV for a tile of keys: sums over all rows of all query heads that share the keys, in order.
template <class C>
SCALEDOT_DEVICE void compute_grad_key_value(const Problem& given, const GenericBackwardPlan<typename C::T>& plan,
                                            int64_t block) {
  using Storage = typename C::Storage;
  using T = typename C::T;
  using L = ScoreLayout<C, kBackwardColumnWarps>;
  auto& shared = *static_cast<GenericBackwardShared<C>*>(shared_memory());
  KeyTask task = key_task(block, ceil_div(given.key_length, C::kSide), plan.panels);
  const Problem& p = problem_of_block<C, kThreads<C, kBackwardColumnWarps>>(given, task.kv_group, &shared + 1);
  const int64_t kv_group = task.kv_group;
  const int panel = task.panel;
  const Range keys = key_tile(p, task.tile, C::kSide);
  if (C::kPacked && keys.begin >= keys.end) return;
  // A packed sequence is a batch of one; the constant saves a register, and so do 32 bits.
  const int batch = C::kPacked ? 0 : int(kv_group / p.kv_heads),
            kv_head = C::kPacked ? int(kv_group) : int(kv_group % p.kv_heads);
  const bool wants_key = p.grad_key.data && panel < panels_of(p.head_dim, C::kPanel);
  const bool wants_value = p.grad_value.data && panel < panels_of(p.value_dim, C::kPanel);
  const bool adds_value = wants_value && p.grad_output.data;
  const int column_warp = warp_index() / C::kRowWarps;
  const PanelShare<C> key_share(p.head_dim, panel, column_warp), value_share(p.value_dim, panel, column_warp);
  BackwardStages<C> stages = backward_stages<C>(shared);
  stages.set_keys(p, batch, kv_head, keys);
  T grad_key[PanelShare<C>::kTiles][4], grad_value[PanelShare<C>::kTiles][4];
  clear(grad_key);
  clear(grad_value);

  for (int index = 0; index < int(tiles_per_kv_group(plan.tiling)); ++index) {
    StackedTile tile = query_tile(p, plan.tiling, kv_group, index);
    tile.batch = batch;
    if (is_empty<C>(tile) || kind_of_tile<C>(p, tile, keys) == TileKind::skip || !(wants_key || adds_value)) continue;
    const ScoreOptions<T> options = score_options<C>(p, tile, keys);
    stages.set_query_rows(p, tile);
    T s[L::kTiles][4], dp[L::kTiles][4];
    score_products<C>(p, stages, s, dp);
    const ElementBits bits = score_gradients<C, false>(p, plan, tile, keys, options, false, s, dp);
    const int depth = int(round_up(tile_rows(tile), 16));
    // dV += Pd^T dO
    if (adds_value) {
      // The loads since the last read of shared.scores had barriers.
      store_tile<C, kBackwardColumnWarps>(shared.scores, s, bits.masked, options.masks);
      wait_for_panels(stages.grad_output, panel, stages.grad_output, panel, stages.pending);
      barrier();
      const bool finite = !options.masks || stages.grad_output.finite();
      multiply_weights<ALayout::transposed>(
          finite, grad_value, SharedMatrix<Storage>{shared.scores + L::warp_row(), C::kScorePitch},
          SharedMatrix<Storage>{stages.grad_output.data + value_share.first, C::kPitch}, depth, value_share.tiles);
    }
    // dK += dX^T Q
    if (wants_key) {
      if (adds_value) barrier();  // all warps have read the weights
      store_tile<C, kBackwardColumnWarps>(shared.scores, dp, bits.not_live, options.masks);
      wait_for_panels(stages.query, panel, stages.query, panel, stages.pending);
      barrier();
      const bool finite = !options.masks || stages.query.finite();
      multiply_weights<ALayout::transposed>(
          finite, grad_key, SharedMatrix<Storage>{shared.scores + L::warp_row(), C::kScorePitch},
          SharedMatrix<Storage>{stages.query.data + key_share.first, C::kPitch}, depth, key_share.tiles);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t key = keys.begin + L::row(half);
    if (key >= keys.end) continue;
    if (wants_key)
      store_sums<C>(p, p.grad_key, batch, kv_head, key, p.head_dim, panel, key_share, half, T(p.scale), grad_key);
    if (wants_value)
      store_sums<C>(p, p.grad_value, batch, kv_head, key, p.value_dim, panel, value_share, half, T(1), grad_value);
  }
}

template <class C>
SCALEDOT_KERNEL((kThreads<C, kBackwardColumnWarps>))
grad_key_value_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM GenericBackwardPlan<typename C::T> plan) {
  compute_grad_key_value<C>(p, plan, block_index());
}

}  // namespace
}  // namespace scaledot
