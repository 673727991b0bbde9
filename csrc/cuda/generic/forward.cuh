// The forward pass.
//
//   for each tile of rows:  m = -inf, l = 0, O = 0
//     for each tile of keys that at least one of the rows may attend to, by positions and blocks:
//       S = scores(Q K^T)                             (scores.cuh)
//       m' = max(m, rowmax S)      P = exp(S - m')    l = l exp(m - m') + rowsum P
//       O = O exp(m - m') + dropout(P) V
//     output = O / (l (1 - dropout_p))                lse = m + log l
// Online softmax: Milakov and Gimelshein 2018; tiled attention: Rabe and Staats 2021, Dao et al. 2022.
//
// With few rows and many keys, one block a tile of rows would leave most of a GPU idle. The keys are then split among
// blocks, and a second kernel merges the partial results in order (forward_merge.cuh). The number of splits depends on
// the shape alone, so results do not depend on the GPU.
#pragma once

#include "cuda/generic/forward_plan.cuh"
#include "cuda/generic/quantised.cuh"
#include "cuda/generic/softmax.cuh"

namespace scaledot {
namespace {

// Barrier of the block.
template <class C>
SCALEDOT_DEVICE void barrier_of_block() {
  if constexpr (kThreads<C, kForwardColumnWarps> == kWarpSize)
    warp_barrier();
  else
    barrier();
}

// Finds the work of a block.
template <class C, class T>
SCALEDOT_DEVICE ForwardTile<T> forward_tile(const Problem& p, const GenericForwardPlan<T>& plan,
                                            const QueryTask& task) {
  const StackedTile tile = query_tile(p, plan.tiling, task.kv_group, task.tile);
  if (is_empty<C>(tile)) return {tile, {0, 0}, {0, 0}, T(0)};
  const int64_t split_keys = plan.split_tiles * C::kKeys;
  const Range split = {task.split * split_keys, (task.split + 1) * split_keys};
  return {tile,
          key_tiles_of(intersect(key_range(p, tile.rows), split), C::kKeys),
          {row_keys(p, tile.rows.end - 1).begin, row_keys(p, tile.rows.begin).end},
          score_scale<C>(p, tile)};
}
// Decode: in shared memory, where it takes no registers.
template <class C, class T, class Shared>
SCALEDOT_DEVICE const ForwardTile<T>& kept_tile(const ForwardTile<T>& tile, Shared& shared) {
  if constexpr (C::kDecode) {
    if (thread_index() == 0) shared.tile = tile;
    warp_barrier();
    return shared.tile;
  } else {
    return tile;
  }
}

// The pipeline stage of a tile's queries. They are mostly loaded once, so their address does not stay in registers.
template <class C>
struct QueryStage {
  typename C::Storage* data;
  const Problem* problem;
  const StackedTile* tile;
  int panel = -1;

  SCALEDOT_MEMBER void prefetch(int wanted) {
    panel = wanted;
    const PanelRows<C> rows = rows_of_tile<C>(*problem, problem->query, *tile, problem->head_dim);
    PanelStage<C, kThreads<C, kForwardColumnWarps>, false, C::kRows>{data, rows, -1}.prefetch(wanted);
  }
  SCALEDOT_MEMBER void arrive() {}
};

// The pipeline stages of a block's operands.
template <class C>
struct ForwardStages {
  static constexpr int kBlockThreads = kThreads<C, kForwardColumnWarps>;
  using Keys = KeyStages<C, kBlockThreads>;
  using KeyStage = typename Keys::Stage;
  QueryStage<C> query;
  KeyStage key, value;

  // The copies of one call are a group of cp_async_commit().
  SCALEDOT_MEMBER void prefetch_keys(const Problem& p, Range keys) {
    key.set_keys(keys);
    if (p.head_dim > 0) {
      key.prefetch(0);
      if (query.panel != 0) query.prefetch(0);
    }
    cp_async_commit();
  }
  SCALEDOT_MEMBER void prefetch_values(Range keys, int panel) {
    value.set_keys(keys);
    value.prefetch(panel);
    cp_async_commit();
  }
  // Waits for a stage whose copies are all older than the last group.
  SCALEDOT_MEMBER void wait_for(KeyStage& stage) {
    cp_async_wait_older();
    stage.arrive();
    barrier_of_block<C>();
  }
};

// S = Q K^T, with the keys that were prefetched.
template <class C, class T>
SCALEDOT_DEVICE void forward_products(const Problem& p, ForwardStages<C>& stages, bool active,
                                      T (&s)[ScoreLayout<C, kForwardColumnWarps>::kTiles][4]) {
  using Storage = typename C::Storage;
  using L = ScoreLayout<C, kForwardColumnWarps>;
  const int head_panels = panels_of(p.head_dim, C::kPanel);
  clear(s);
  stages.wait_for(stages.key);
  for (int c = 0; c < head_panels; ++c) {
    bool pending = false;
    wait_for_panels(stages.query, c, stages.key, c, pending);
    if constexpr (C::kDecode)
      multiply_decode_keys<C>(s, stages.query.data, stages.key);
    else if (active)
      multiply<ALayout::rows, BLayout::by_column>(
          s, SharedMatrix<Storage>{stages.query.data + L::warp_row() * C::kPitch, C::kPitch},
          SharedMatrix<Storage>{stages.key.data, C::kPitch}, panel_width(p.head_dim, c, C::kPanel), L::kTiles);
  }
}

// Stores the low part of the output (core/saved.h). A separate loop with its own addresses needs fewer registers.
template <class C, class T>
SCALEDOT_DEVICE void store_output_low(const Problem& p, const QueryTask& task, const StackedTile& tile,
                                      const RowState<T> (&state)[2], const T (&out)[C::kPanel / 8][4]) {
  using Storage = typename C::Storage;
  using L = ScoreLayout<C, kForwardColumnWarps>;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ThreadRow<T> row = thread_row<T>(p, tile, opt_barrier(L::row(half)), {0, 0});
    if (!row.exists) continue;
    const T factor = output_factor_of<C>(p, tile, state[half], T(dropout_scale(p)));
    Storage* to = element_ptr<Storage>(p, p.output_low, tile.batch, row.head) + row.i * p.output_low.row_stride;
#pragma unroll
    for (int n = 0; n < C::kPanel / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int64_t col = int64_t(task.panel) * C::kPanel + out_column<C>(n, j);
        if (col >= p.value_dim) continue;
        const T exact = out[n][2 * half + j] * factor;
        Storage x;
        narrow(exact, x);
        global_store(to + col, output_low_of(exact, x));
      }
  }
}

// The results of the thread's rows: the output and lse, or the partial results of a split.
template <class C, class T>
SCALEDOT_DEVICE void store_forward(const Problem& p, const GenericForwardPlan<T>& plan, const QueryTask& task,
                                   const StackedTile& tile, const RowState<T> (&state)[2],
                                   const T (&out)[C::kPanel / 8][4]) {
  using Storage = typename C::Storage;
  using L = ScoreLayout<C, kForwardColumnWarps>;
  const T inverse_keep = T(dropout_scale(p));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ThreadRow<T> row = thread_row<T>(p, tile, L::row(half), {0, 0});
    if (!row.exists) continue;
    if (plan.splits > 1) {
      const int64_t partial = block_index() * C::kRows + L::row(half);
      if (lane_index() % 4 == 0) global_store(plan.partial_states + partial, state[half]);
      if (state[half].sum == T(0)) continue;
#pragma unroll
      for (int n = 0; n < C::kPanel / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          global_store(plan.partials + partial * C::kPanel + out_column<C>(n, j), out[n][2 * half + j]);
      continue;
    }
    const T factor = output_factor_of<C>(p, tile, state[half], inverse_keep);
    Storage* output = element_ptr<Storage>(p, p.output, tile.batch, row.head) + row.i * p.output.row_stride;
#pragma unroll
    for (int n = 0; n < C::kPanel / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int64_t col = int64_t(task.panel) * C::kPanel + out_column<C>(n, j);
        if (col >= p.value_dim) continue;
        Storage x;
        narrow(out[n][2 * half + j] * factor, x);
        global_store(output + col * p.output.col_stride, x);
      }
    if (task.panel != 0 || lane_index() % 4 != 0) continue;
    if (p.lse.data)
      global_store(element_ptr<T>(p, p.lse, tile.batch, row.head) + row.i * p.lse.row_stride, logsumexp(state[half]));
    if (plan.states) global_store(plan.states + row_number(p, tile, row), state[half]);
  }
}

template <class C>
SCALEDOT_SHARED_KERNEL((kThreads<C, kForwardColumnWarps>), C::kBlocks)
forward_kernel(SCALEDOT_PARAM Problem given, SCALEDOT_PARAM GenericForwardPlan<typename C::T> plan) {
  using Storage = typename C::Storage;
  using T = typename C::T;
  using L = ScoreLayout<C, kForwardColumnWarps>;
  constexpr int kOutTiles = C::kPanel / 8;
  using Keys = KeyStages<C, kThreads<C, kForwardColumnWarps>>;
  auto& shared = *static_cast<typename Keys::Shared*>(shared_memory());
  QueryTask task = query_task(block_index(), plan.tiling, plan.panels, plan.splits);
  const Problem& p = problem_of_block<C, kThreads<C, kForwardColumnWarps>>(given, task.kv_group, &shared + 1);
  const ForwardTile<T> own = forward_tile<C>(p, plan, task);
  if (is_empty<C>(own.tile)) return;
  const ForwardTile<T>& block = kept_tile<C>(own, shared);
  const StackedTile& tile = block.tile;
  const bool active = L::warp_row() < tile_rows(tile);

  ForwardStages<C> stages = {{shared.query, &p, &tile}, Keys::keys(shared, p, tile), Keys::values(shared, p, tile)};
  if constexpr (C::kDecode) warp_barrier();
  T out[kOutTiles][4];
  clear(out);
  RowState<T> state[2] = {empty_row<T>(), empty_row<T>()};
  const int out_width = panel_width(p.value_dim, task.panel, C::kPanel);
  int64_t next = next_key_tile<C>(p, tile, block.key_tiles.begin, block.key_tiles.end);
  if (next < block.key_tiles.end) stages.prefetch_keys(p, key_tile(p, next, C::kKeys));

  while (next < block.key_tiles.end) {
    const int64_t t = next;
    next = next_key_tile<C>(p, tile, t + 1, block.key_tiles.end);
    const Range keys = key_tile(p, t, C::kKeys);
    barrier_of_block<C>();  // all warps have done with the values of the last tile
    stages.prefetch_values(keys, task.panel);
    T s[L::kTiles][4];
    forward_products<C>(p, stages, active, s);

    // The next keys are loaded while this tile's softmax and second product run.
    barrier_of_block<C>();
    if (next < block.key_tiles.end)
      stages.prefetch_keys(p, key_tile(p, next, C::kKeys));
    else
      cp_async_commit();

    // Scores of rows that do not exist may be anything: they are not stored.
    const bool whole =
        count(keys) == C::kKeys && block.all_attend.begin <= keys.begin && keys.end <= block.all_attend.end;
    ScoreOptions<T> options = score_options<C>(p, tile, keys, whole);
    if constexpr (C::kDecode) options.scale = block.scale;
    uint32_t masked = 0;
    if (active) {
      masked = finish_scores<C, kForwardColumnWarps>(p, tile, options, keys, s);
      rescale(exponentiate<C>(tile, state, s), out);
      if (options.drops) apply_dropout<L>(p, tile, keys, s);
    }
    const bool some_masked = options.masks && barrier_or(masked != 0);
    stages.wait_for(stages.value);
    const bool finite = !some_masked || stages.value.finite();
    if constexpr (C::kDecode) {
      if (finite) {
        multiply_decode_values<C>(out, s, stages.value);
        continue;
      }
    }
    if (active) {
      store_tile<C, kForwardColumnWarps>(shared.weights, s, masked, some_masked);
      warp_barrier();
      if constexpr (C::kDecode)
        multiply_decode_unmasked<C>(out, shared.weights, stages.value);
      else
        multiply_weights<ALayout::rows>(
            finite, out, SharedMatrix<Storage>{shared.weights + L::warp_row() * C::kScorePitch, C::kScorePitch},
            SharedMatrix<Storage>{stages.value.data, C::kPitch}, int(round_up(count(keys), 16)), out_width / 8);
    }
  }
  store_forward<C>(p, plan, task, tile, state, out);
  if constexpr (kSavesOutputLow<C>)
    if (p.output_low.data && plan.splits == 1) store_output_low<C>(p, task, tile, state, out);
}

}  // namespace
}  // namespace scaledot
