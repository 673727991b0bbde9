// The backward pass. Nothing of size (query_length, key_length) is kept: the weights are recomputed.
//
//   delta_i = sum_d dO_id O_id + sum_j dW_ij W_ij - dlse_i                      (W: the returned weights, if any)
//   S  = scores(Q K^T)          P  = exp(S - lse)           Pd = keep P / (1 - dropout_p)      (see RowShift about lse)
//   dP = keep (dO V^T + dW) / (1 - dropout_p)
//   dS = P (dP - delta)         dX = slope * dS             (slope: of the softcap; 0 where the mask replaced the score)
//   dQ = scale dX K             dK = scale dX^T Q           dV = Pd^T dO        dMask = dS        (mask_gradient.cuh)
// Dao et al., "FlashAttention", 2022, appendix B.
//
// dQ is made by a kernel over tiles of rows, dK and dV by one over tiles of keys. Both recompute S and dP: that costs two more
// products than adding to dQ atomically would, and gives the same bits every time.
#pragma once

#include "cuda/generic/forward.cuh"

namespace scaledot {
namespace {

// What turns a score into its probability: P = exp(s - offset - log_sum). Usually offset is lse and log_sum 0, which costs half
// a unit in the last place of lse. Where that is too much (worst is a row whose keys are all masked_fill(-1e9): -1e9 + log 8 is
// -1e9) the forward's maximum and sum are computed again.
template <class T>
struct RowShift {
  T offset;
  T log_sum;
};
constexpr double kPlainLse = 16;  // up to here lse has the precision that float32 weights need

template <class T>
struct BackwardPlan {
  Tiling tiling;
  int64_t panels;
  T* delta;            // of every row
  RowShift<T>* shift;  // of every row
  bool writes_mask;    // the kernel over tiles of rows writes grad_mask
  // mask_gradient.cuh: how many tiles of grad_mask's own elements there are, and in how many slices their sums are taken.
  int64_t mask_batches, mask_heads, mask_row_tiles, mask_key_tiles, mask_slices;
  Tiling mask_tiling;
  int64_t mask_extent;   // elements of grad_mask
  T* mask_parts;         // (slice, element); nullptr if there is one slice
  const int* condition;  // nullptr, or kernels do nothing where it is 0
};

template <class T>
SCALEDOT_DEVICE bool is_wanted(const BackwardPlan<T>& plan) {
  return !plan.condition || global_load(plan.condition) != 0;
}

// delta and shift of a tile's rows.
template <class C>
SCALEDOT_KERNEL((kThreads<C, kForwardColumnWarps>))
prepare_kernel(SCALEDOT_PARAM Problem given, SCALEDOT_PARAM BackwardPlan<typename C::T> plan) {
  if (!is_wanted(plan)) return;
  using Storage = typename C::Storage;
  using T = typename C::T;
  using L = Lane<C, kForwardColumnWarps>;
  using Place = Stage<C, kThreads<C, kForwardColumnWarps>>;
  auto& shared = *static_cast<ScoresShared<C>*>(shared_memory());
  const int64_t tiles = tiles_per_plane(plan.tiling);
  int64_t plane = block_index() / tiles;
  const Problem& p = problem_of_block<C, kThreads<C, kForwardColumnWarps>>(given, plane, &shared + 1);
  const RowTile tile = row_tile(p, plan.tiling, plane, block_index() % tiles);
  if (is_empty<C>(tile)) return;

  // delta: the lanes of a warp share the columns of one row after the other.
  for (int r = L::warp_row(); r < min(L::warp_row() + 16, tile_rows(tile)); ++r) {
    const ThreadRow<T> row = thread_row<T>(p, tile, r, {0, 0});
    const auto dot = [&](const TensorView& a, const TensorView& b, int64_t cols) {
      const Storage* x = at<const Storage>(p, a, tile.batch, row.head) + row.i * a.row_stride;
      const Storage* y = at<const Storage>(p, b, tile.batch, row.head) + row.i * b.row_stride;
      T sum = T(0);
      for (int64_t d = lane_index(); d < cols; d += kWarpSize)
        sum += T(widen(global_load(x + d * a.col_stride))) * T(widen(global_load(y + d * b.col_stride)));
      return sum;
    };
    T sum = p.grad_output.data ? dot(p.output, p.grad_output, p.value_dim) : T(0);
    if (p.grad_weights.data) sum += dot(p.weights, p.grad_weights, p.key_length);
#pragma unroll
    for (int mask = 1; mask < kWarpSize; mask *= 2) sum += shuffle_xor(sum, mask);
    if (lane_index() != 0) continue;
    if (p.grad_lse.data)
      sum -= global_load(at<const T>(p, p.grad_lse, tile.batch, row.head) + row.i * p.grad_lse.row_stride);
    global_store(plan.delta + row_number(p, tile, row), sum);
  }

  // shift. float64 is asked for its precision; and over few rows lse's rounding errors, one to a row, do not average out.
  bool plain = sizeof(T) == sizeof(float) && tiles > 1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ThreadRow<T> row = thread_row<T>(p, tile, L::row(half), {0, 0});
    if (!row.there) continue;
    const T lse = shift(global_load(at<const T>(p, p.lse, tile.batch, row.head) + row.i * p.lse.row_stride));
    plain &= !(lse > T(kPlainLse) || lse < T(-kPlainLse));
    if (lane_index() % 4 == 0) global_store(plan.shift + row_number(p, tile, row), RowShift<T>{lse, T(0)});
  }
  if (!barrier_or(!plain) || p.part.given) return;  // a part does not have all keys

  RowState<T> state[2] = {empty_row<T>(), empty_row<T>()};
  Place query = {shared.query, rows_of_tile<C>(p, p.query, tile, p.head_dim), -1};
  Place key = {shared.key, {}, -1};
  bool arriving = false;
  const Range range = key_tiles_of(key_range(p, tile.rows), C::kSide);
  for (int64_t t = range.begin; t < range.end; ++t) {
    const Range keys = key_tile(p, t, C::kSide);
    const TileTerms<T> terms = tile_terms<C>(p, tile, keys);
    key.point_to(rows_of_keys<C>(p, p.key, tile.batch, tile.kv_head, keys, p.head_dim));
    T s[L::kTiles][4];
    clear(s);
    for (int c = 0; c < panels_of(p.head_dim, C::kPanel); ++c) {
      bring(query, c, key, c, arriving);
      multiply<ALayout::rows, BLayout::by_column>(
          s, Operand<Storage>{query.data + L::warp_row() * C::kPitch, C::kPitch}, Operand<Storage>{key.data, C::kPitch},
          panel_width(p.head_dim, c, C::kPanel), L::kTiles);
    }
    exponentiate<C>(state, finish_scores<C, kForwardColumnWarps>(p, tile, terms, keys, s), s);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ThreadRow<T> row = thread_row<T>(p, tile, L::row(half), {0, 0});
    if (row.there && lane_index() % 4 == 0)
      global_store(plan.shift + row_number(p, tile, row),
                   RowShift<T>{shift(state[half].maximum), state[half].sum == T(0) ? T(0) : log(state[half].sum)});
  }
}

// Bit 4n + e: element e of group n is masked, or is not live.
struct ElementBits {
  uint32_t masked, not_live;
};

// From S and dP to Pd, in s, and dX (or dS, if kOnlyScores), in dp.
template <class C, bool kOnlyScores, class T>
SCALEDOT_DEVICE ElementBits score_gradients(const Problem& p, const BackwardPlan<T>& plan, const RowTile& tile,
                                            Range keys, const TileTerms<T>& terms, bool writes_mask,
                                            T (&s)[Lane<C, kBackwardColumnWarps>::kTiles][4],
                                            T (&dp)[Lane<C, kBackwardColumnWarps>::kTiles][4]) {
  using Storage = typename C::Storage;
  using L = Lane<C, kBackwardColumnWarps>;
  ElementBits bits = {0, 0};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ThreadRow<T> row = thread_row<T>(p, tile, L::row(half), keys);
    RowShift<T> shift = {T(0), T(0)};
    T delta = T(0);
    const Storage* grad_weights = nullptr;
    int64_t grad_mask = 0;
    if (row.there) {
      shift = global_load(plan.shift + row_number(p, tile, row));
      delta = global_load(plan.delta + row_number(p, tile, row));
      if (p.grad_weights.data)
        grad_weights = at<const Storage>(p, p.grad_weights, tile.batch, row.head) + row.i * p.grad_weights.row_stride;
      if (writes_mask) grad_mask = offset(p, p.grad_mask, tile.batch, row.head) + row.i * p.grad_mask.row_stride;
    }
    const uint32_t kept = terms.drops ? kept_bits<L>(p, tile, row, keys) : ~uint32_t(0);
#pragma unroll
    for (int n = 0; n < L::kTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int e = 2 * half + j, k = L::key(n, j);
        const Score<T> x = score(p, terms, row, keys, k, s[n][e]);
        const bool masked = x.state == kMasked, keeps = kept >> (2 * n + j) & 1;
        const T weight = weight_exp<C>(rounded_subtract(x.value, shift.offset) - shift.log_sum);
        T grad = dp[n][e];
        if (grad_weights && !masked)
          grad += T(widen(global_load(grad_weights + (keys.begin + k) * p.grad_weights.col_stride)));
        grad = keeps ? grad * terms.kept : T(0);
        const T grad_score = masked ? T(0) : weight * (grad - delta);
        s[n][e] = masked ? T(0) : weight * (keeps ? terms.kept : T(0));
        dp[n][e] = kOnlyScores ? grad_score : grad_score * x.slope;
        bits.masked |= uint32_t(masked) << (4 * n + e);
        bits.not_live |= uint32_t(x.state != kLive) << (4 * n + e);
        if (writes_mask && row.there && k < int(count(keys)))
          global_store_element(p.grad_mask.data, p.grad_mask.dtype,
                               grad_mask + (keys.begin + k) * p.grad_mask.col_stride, grad_score);
      }
  }
  return bits;
}

// The operands of a tile's S and dP in shared memory.
template <class C>
struct TileStages {
  using Storage = typename C::Storage;
  using Place = Stage<C, kThreads<C, kBackwardColumnWarps>>;
  Place query, key, value, grad_output;
  bool arriving;

  SCALEDOT_MEMBER void point_to_keys(const Problem& p, int64_t batch, int64_t kv_head, Range keys) {
    key.point_to(rows_of_keys<C>(p, p.key, batch, kv_head, keys, p.head_dim));
    value.point_to(rows_of_keys<C>(p, p.value, batch, kv_head, keys, p.value_dim));
  }
  SCALEDOT_MEMBER void point_to_rows(const Problem& p, const RowTile& tile) {
    query.point_to(rows_of_tile<C>(p, p.query, tile, p.head_dim));
    if (p.grad_output.data) grad_output.point_to(rows_of_tile<C>(p, p.grad_output, tile, p.value_dim));
  }
};

template <class C, class Shared>
SCALEDOT_DEVICE TileStages<C> tile_stages(Shared& shared) {
  return {{shared.query, {}, -1}, {shared.key, {}, -1}, {shared.value, {}, -1}, {shared.grad_output, {}, -1}, false};
}

// s = Q K^T and dp = dO V^T.
template <class C, class T>
SCALEDOT_DEVICE void tile_products(const Problem& p, TileStages<C>& stages,
                                   T (&s)[Lane<C, kBackwardColumnWarps>::kTiles][4],
                                   T (&dp)[Lane<C, kBackwardColumnWarps>::kTiles][4]) {
  using Storage = typename C::Storage;
  using L = Lane<C, kBackwardColumnWarps>;
  const int row = L::warp_row() * C::kPitch, key = L::warp_key() * C::kPitch;
  clear(s);
  clear(dp);
  for (int c = 0; c < panels_of(p.head_dim, C::kPanel); ++c) {
    bring(stages.query, c, stages.key, c, stages.arriving);
    multiply<ALayout::rows, BLayout::by_column>(s, Operand<Storage>{stages.query.data + row, C::kPitch},
                                                Operand<Storage>{stages.key.data + key, C::kPitch},
                                                panel_width(p.head_dim, c, C::kPanel), L::kTiles);
  }
  if (!p.grad_output.data) return;
  for (int c = 0; c < panels_of(p.value_dim, C::kPanel); ++c) {
    bring(stages.grad_output, c, stages.value, c, stages.arriving);
    multiply<ALayout::rows, BLayout::by_column>(dp, Operand<Storage>{stages.grad_output.data + row, C::kPitch},
                                                Operand<Storage>{stages.value.data + key, C::kPitch},
                                                panel_width(p.value_dim, c, C::kPanel), L::kTiles);
  }
}

// Which columns of a panel a warp makes: its half of them.
template <class C>
struct PanelShare {
  static constexpr int kTiles = C::kPanel / 8 / kBackwardColumnWarps;
  int first;  // column
  int tiles;

  // For the warps warp_index() = kRowWarps * column_warp + ...
  SCALEDOT_HOST_DEVICE constexpr PanelShare(int64_t cols, int panel, int column_warp) : first(0), tiles(0) {
    const int width = panel_width(cols, panel, C::kPanel);
    const int share = int(round_up(width, 16 * kBackwardColumnWarps)) / kBackwardColumnWarps;
    first = column_warp * share;
    tiles = max(min(share, width - first), 0) / 8;
  }
};

// What one block of the kernel over tiles of keys computes.
struct KeyTask {
  int64_t plane, tile;
  int panel;
};
SCALEDOT_FN KeyTask key_task(int64_t block, int64_t key_tiles, int64_t panels) {
  return {block / panels / key_tiles, block / panels % key_tiles, int(block % panels)};
}

// Rows first_row + 16 warp rows of a result: `factor` times the sums.
template <class C, class T>
SCALEDOT_DEVICE void store_sums(const Problem& p, const TensorView& view, int64_t batch, int64_t head, int64_t row,
                                int64_t cols, int panel, const PanelShare<C>& share, int half, T factor,
                                const T (&sums)[PanelShare<C>::kTiles][4]) {
  using Storage = typename C::Storage;
  Storage* to = at<Storage>(p, view, batch, head) + row * view.row_stride;
#pragma unroll
  for (int n = 0; n < PanelShare<C>::kTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t col = panel * C::kPanel + share.first + Lane<C, kBackwardColumnWarps>::column(n, j);
      if (n >= share.tiles || col >= cols) continue;
      Storage x;
      narrow(sums[n][2 * half + j] * factor, x);
      global_store(to + col * view.col_stride, x);
    }
}

// One panel of dQ for a tile of rows, and dMask where every element of it belongs to one score only.
template <class C>
SCALEDOT_KERNEL((kThreads<C, kBackwardColumnWarps>))
grad_query_kernel(SCALEDOT_PARAM Problem given, SCALEDOT_PARAM BackwardPlan<typename C::T> plan) {
  if (!is_wanted(plan)) return;
  using Storage = typename C::Storage;
  using T = typename C::T;
  using L = Lane<C, kBackwardColumnWarps>;
  auto& shared = *static_cast<BackwardShared<C>*>(shared_memory());
  ForwardTask task = forward_task(block_index(), plan.tiling, plan.panels, 1);
  const Problem& p = problem_of_block<C, kThreads<C, kBackwardColumnWarps>>(given, task.plane, &shared + 1);
  const RowTile tile = row_tile(p, plan.tiling, task.plane, task.tile);
  if (is_empty<C>(tile)) return;
  const bool wanted = p.grad_query.data && p.head_dim > 0, writes_mask = plan.writes_mask && task.panel == 0;
  const PanelShare<C> share(p.head_dim, task.panel, warp_index() / C::kRowWarps);
  TileStages<C> stages = tile_stages<C>(shared);
  stages.point_to_rows(p, tile);
  T sums[PanelShare<C>::kTiles][4];
  clear(sums);

  const Range range = key_tiles_of(key_range(p, tile.rows), C::kSide);
  for (int64_t t = range.begin; t < range.end; ++t) {
    const Range keys = key_tile(p, t, C::kSide);
    const TileTerms<T> terms = tile_terms<C>(p, tile, keys);
    stages.point_to_keys(p, tile.batch, tile.kv_head, keys);
    T s[L::kTiles][4], dp[L::kTiles][4];
    tile_products<C>(p, stages, s, dp);
    const ElementBits bits = score_gradients<C, false>(p, plan, tile, keys, terms, writes_mask, s, dp);
    if (!wanted) continue;
    // dQ += dX K
    store_tile<C, kBackwardColumnWarps>(shared.scores, dp, bits.not_live, terms.masks);
    bring(stages.key, task.panel, stages.key, task.panel, stages.arriving);
    bool finite = true;
    if (terms.masks)
      finite = stages.key.finite();
    else
      barrier();
    multiply_weights<ALayout::rows>(
        finite, sums, Operand<Storage>{shared.scores + L::warp_row() * C::kScorePitch, C::kScorePitch},
        Operand<Storage>{stages.key.data + share.first, C::kPitch}, int(round_up(count(keys), 16)), share.tiles);
  }
  if (!wanted) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ThreadRow<T> row = thread_row<T>(p, tile, L::row(half), {0, 0});
    if (row.there)
      store_sums<C>(p, p.grad_query, tile.batch, row.head, row.i, p.head_dim, task.panel, share, half, T(p.scale),
                    sums);
  }
}

// One panel of dK and of dV for a tile of keys: sums over all rows of all query heads that share them, in order.
template <class C>
SCALEDOT_KERNEL((kThreads<C, kBackwardColumnWarps>))
grad_key_value_kernel(SCALEDOT_PARAM Problem given, SCALEDOT_PARAM BackwardPlan<typename C::T> plan) {
  if (!is_wanted(plan)) return;
  using Storage = typename C::Storage;
  using T = typename C::T;
  using L = Lane<C, kBackwardColumnWarps>;
  auto& shared = *static_cast<BackwardShared<C>*>(shared_memory());
  KeyTask task = key_task(block_index(), ceil_div(given.key_length, C::kSide), plan.panels);
  const Problem& p = problem_of_block<C, kThreads<C, kBackwardColumnWarps>>(given, task.plane, &shared + 1);
  const int64_t plane = task.plane;
  const int panel = task.panel;
  const Range keys = key_tile(p, task.tile, C::kSide);
  if (C::kPacked && keys.begin >= keys.end) return;
  // A sequence is a batch of one: what the compiler knows takes no register.
  const int64_t batch = C::kPacked ? 0 : plane / p.kv_heads, kv_head = C::kPacked ? plane : plane % p.kv_heads;
  const bool wants_key = p.grad_key.data && panel < panels_of(p.head_dim, C::kPanel);
  const bool wants_value = p.grad_value.data && panel < panels_of(p.value_dim, C::kPanel);
  const bool adds_value = wants_value && p.grad_output.data;
  const int column_warp = warp_index() / C::kRowWarps;
  const PanelShare<C> key_share(p.head_dim, panel, column_warp), value_share(p.value_dim, panel, column_warp);
  TileStages<C> stages = tile_stages<C>(shared);
  stages.point_to_keys(p, batch, kv_head, keys);
  T grad_key[PanelShare<C>::kTiles][4], grad_value[PanelShare<C>::kTiles][4];
  clear(grad_key);
  clear(grad_value);

  for (int64_t index = 0; index < tiles_per_plane(plan.tiling); ++index) {
    RowTile tile = row_tile(p, plan.tiling, plane, index);
    tile.batch = int(batch);
    if (is_empty<C>(tile) || tile_kind(p, tile.rows, keys) == TileKind::skip || !(wants_key || adds_value)) continue;
    const TileTerms<T> terms = tile_terms<C>(p, tile, keys);
    stages.point_to_rows(p, tile);
    T s[L::kTiles][4], dp[L::kTiles][4];
    tile_products<C>(p, stages, s, dp);
    const ElementBits bits = score_gradients<C, false>(p, plan, tile, keys, terms, false, s, dp);
    const int depth = int(round_up(tile_rows(tile), 16));
    // dV += Pd^T dO
    if (adds_value) {
      // Loads have brought barriers since the tile of scores was read last.
      store_tile<C, kBackwardColumnWarps>(shared.scores, s, bits.masked, terms.masks);
      bring(stages.grad_output, panel, stages.grad_output, panel, stages.arriving);
      barrier();
      const bool finite = !terms.masks || stages.grad_output.finite();
      multiply_weights<ALayout::transposed>(
          finite, grad_value, Operand<Storage>{shared.scores + L::warp_row(), C::kScorePitch},
          Operand<Storage>{stages.grad_output.data + value_share.first, C::kPitch}, depth, value_share.tiles);
    }
    // dK += dX^T Q
    if (wants_key) {
      if (adds_value) barrier();  // the weights have been used
      store_tile<C, kBackwardColumnWarps>(shared.scores, dp, bits.not_live, terms.masks);
      bring(stages.query, panel, stages.query, panel, stages.arriving);
      barrier();
      const bool finite = !terms.masks || stages.query.finite();
      multiply_weights<ALayout::transposed>(
          finite, grad_key, Operand<Storage>{shared.scores + L::warp_row(), C::kScorePitch},
          Operand<Storage>{stages.query.data + key_share.first, C::kPitch}, depth, key_share.tiles);
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

}  // namespace
}  // namespace scaledot
