// The first kernel of the backward: delta and lse of every row.
//
//   delta_i = sum_d dO_id O_id + sum_j dW_ij W_ij - dlse_i      (W: the returned weights, if any)
//
// O includes its low part (core/saved.h), if that was saved.
// lse is split in two parts where one number would not be precise enough (SplitLse in core/softmax.h).
#pragma once

#include "cuda/generic/backward_plan.cuh"
#include "cuda/generic/softmax.cuh"

namespace scaledot {
namespace {

// Computes delta for the rows of a warp, one after the other: its lanes share the columns.
template <class C, class T>
SCALEDOT_DEVICE void store_delta(const Problem& p, const GenericBackwardPlan<T>& plan, const StackedTile& tile) {
  using Storage = typename C::Storage;
  using L = ScoreLayout<C, kForwardColumnWarps>;
  for (int r = L::warp_row(); r < min(L::warp_row() + kMmaRows, tile_rows(tile)); ++r) {
    const ThreadRow<T> row = thread_row<T>(p, tile, r, {0, 0});
    const auto dot = [&](const TensorView& a, const TensorView& b, int64_t cols) {
      const Storage* x = element_ptr<const Storage>(p, a, tile.batch, row.head) + row.i * a.row_stride;
      const Storage* y = element_ptr<const Storage>(p, b, tile.batch, row.head) + row.i * b.row_stride;
      T sum = T(0);
      for (int64_t d = lane_index(); d < cols; d += kWarpSize)
        sum += T(widen(global_load(x + d * a.col_stride))) * T(widen(global_load(y + d * b.col_stride)));
      return sum;
    };
    T sum = p.grad_output.data ? dot(p.output, p.grad_output, p.value_dim) : T(0);
    if constexpr (sizeof(Storage) == 2)
      if (p.grad_output.data && p.output_low.data) sum += dot(p.output_low, p.grad_output, p.value_dim);
    if (p.grad_weights.data) sum += dot(p.weights, p.grad_weights, p.key_length);
#pragma unroll
    for (int mask = 1; mask < kWarpSize; mask *= 2) sum += shuffle_xor(sum, mask);
    if (lane_index() != 0) continue;
    if (p.grad_lse.data)
      sum -= global_load(element_ptr<const T>(p, p.grad_lse, tile.batch, row.head) + row.i * p.grad_lse.row_stride);
    global_store(plan.rows.delta + row_number(p, tile, row), sum);
  }
}

// Where the problem of a packed sequence is: after the operands of the scores.
template <class C>
SCALEDOT_DEVICE void* end_of_scores() {
  return static_cast<GenericScoresShared<C>*>(shared_memory()) + 1;
}

// Calls store(row, lse) with lse unsplit. Returns whether that is precise enough for the thread's rows. It never is for
// float64; nor for a single tile of rows in float32, where too few rounding errors of lse, one a row, average out.
template <class C, class T, class Store>
SCALEDOT_DEVICE bool store_lse(const Problem& p, const StackedTile& tile, bool single, const Store& store) {
  using L = ScoreLayout<C, kForwardColumnWarps>;
  constexpr bool kIs16Bit = sizeof(typename C::Storage) == 2;
  bool precise = sizeof(T) == sizeof(float) && (kIs16Bit || !single);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ThreadRow<T> row = thread_row<T>(p, tile, L::row(half), {0, 0});
    if (!row.exists) continue;
    const T lse = shift(global_load(element_ptr<const T>(p, p.lse, tile.batch, row.head) + row.i * p.lse.row_stride));
    precise &= lse_is_precise(lse, kIs16Bit ? kPreciseLse16 : kPreciseLse);
    if (lane_index() % 4 == 0) store(row, SplitLse<T>{lse, T(0)});
  }
  return precise;
}

// Calls store(row, lse) for all rows of a tile, once more with lse in two parts where it has to be. `single`: whether
// the KV group has no other tile.
template <class C, class T, class Store>
SCALEDOT_DEVICE void prepare_lse(const Problem& p, const StackedTile& tile, bool single, const Store& store) {
  using Storage = typename C::Storage;
  using L = ScoreLayout<C, kForwardColumnWarps>;
  using Stage = PanelStage<C, kThreads<C, kForwardColumnWarps>>;
  auto& shared = *static_cast<GenericScoresShared<C>*>(shared_memory());
  const bool precise = store_lse<C, T>(p, tile, single, store);
  if (!barrier_or(!precise) || p.part.given) return;  // a part does not have all keys

  // Recomputes the maximum and the sum of every row of the tile.
  RowState<T> state[2] = {empty_row<T>(), empty_row<T>()};
  Stage query = {shared.query, rows_of_tile<C>(p, p.query, tile, p.head_dim), -1};
  Stage key = {shared.key, {}, -1};
  bool pending = false;
  const Range range = key_tiles_of(key_range(p, tile.rows), C::kSide);
  for (int64_t t = range.begin; t < range.end; ++t) {
    const Range keys = key_tile(p, t, C::kSide);
    if (blocks_skip<C>(p, tile, keys)) continue;
    const ScoreOptions<T> options = score_options<C>(p, tile, keys);
    key.set_rows(rows_of_keys<C>(p, p.key, tile.batch, tile.kv_head, keys, p.head_dim));
    T s[L::kTiles][4];
    clear(s);
    for (int c = 0; c < panels_of(p.head_dim, C::kPanel); ++c) {
      wait_for_panels(query, c, key, c, pending);
      multiply<ALayout::rows, BLayout::by_column>(
          s, SharedMatrix<Storage>{query.data + L::warp_row() * C::kPitch, C::kPitch},
          SharedMatrix<Storage>{key.data, C::kPitch}, panel_width(p.head_dim, c, C::kPanel), L::kTiles);
    }
    finish_scores<C, kForwardColumnWarps>(p, tile, options, keys, s);
    exponentiate<C>(tile, state, s);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ThreadRow<T> row = thread_row<T>(p, tile, L::row(half), {0, 0});
    if (row.exists && lane_index() % 4 == 0)
      store(row, SplitLse<T>{shift(state[half].maximum), state[half].sum == T(0) ? T(0) : log(state[half].sum)});
  }
}

// One block a tile.
template <class C>
SCALEDOT_KERNEL((kThreads<C, kForwardColumnWarps>))
prepare_kernel(SCALEDOT_PARAM Problem given, SCALEDOT_PARAM GenericBackwardPlan<typename C::T> plan) {
  using T = typename C::T;
  const int64_t tiles = tiles_per_kv_group(plan.tiling);
  int64_t kv_group = block_index() / tiles;
  const Problem& p = problem_of_block<C, kThreads<C, kForwardColumnWarps>>(given, kv_group, end_of_scores<C>());
  const StackedTile tile = query_tile(p, plan.tiling, kv_group, block_index() % tiles);
  if (is_empty<C>(tile)) return;
  store_delta<C>(p, plan, tile);
  prepare_lse<C, T>(p, tile, tiles == 1, [&](const ThreadRow<T>& row, const SplitLse<T>& lse) {
    global_store(plan.rows.lse + row_number(p, tile, row), lse);
  });
}

}  // namespace
}  // namespace scaledot
