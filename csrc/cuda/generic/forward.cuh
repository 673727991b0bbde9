// The forward pass.
//
//   for each tile of rows:  m = -inf, l = 0, O = 0
//     for each tile of keys that the mask leaves:
//       S = scores(Q K^T)                             (scores.cuh)
//       m' = max(m, rowmax S)      P = exp(S - m')    l = l exp(m - m') + rowsum P
//       O = O exp(m - m') + drop(P) V
//     output = O / (l (1 - dropout_p))                lse = m + log l
//   weights, if asked for: a kernel of its own over tiles of scores, drop(exp(S - m)) / (l (1 - dropout_p))
// Online softmax: Milakov and Gimelshein 2018; tiled attention: Rabe and Staats 2021, Dao et al. 2022.
//
// Few rows over many keys would leave most of a GPU idle: the keys are then split among blocks, and a last kernel merges the parts in
// order. How many splits there are depends on the shape alone, so results do not depend on the GPU.
#pragma once

#include "core/arena.h"
#include "cuda/generic/scores.cuh"
#include "cuda/kernel.h"
#include "cuda/ptx/launch.h"

namespace scaledot {
namespace {

template <class T>
struct ForwardPlan {
  Tiling tiling;
  int64_t panels;       // of the output's columns: a block makes one
  int64_t splits;       // of the keys
  int64_t split_tiles;  // tiles of keys in a split
  RowState<T>* states;  // of every row, for the weights; nullptr if they are not asked for
  T* parts;             // (plane, tile, panel, split): kSide rows of kPanel columns; if splits > 1
  RowState<T>* part_states;
};

// What one block of the forward computes.
struct ForwardTask {
  int64_t plane, tile;
  int panel, split;
};
SCALEDOT_FN ForwardTask forward_task(int64_t block, const Tiling& tiling, int64_t panels, int64_t splits) {
  const int64_t tiles = tiles_per_plane(tiling);
  return {block / (splits * panels * tiles), block / (splits * panels) % tiles, int(block / splits % panels),
          int(block % splits)};
}

// Scores in place of dot products. Returns one bit for every element: masked. A thread has one of its rows in hand at a time: what is
// known of both would take too many registers.
template <class C, int kColumnWarps, class T>
SCALEDOT_DEVICE uint32_t finish_scores(const Problem& p, const RowTile& tile, const TileTerms<T>& terms, Range keys,
                                       T (&s)[Lane<C, kColumnWarps>::kTiles][4]) {
  using L = Lane<C, kColumnWarps>;
  uint32_t masked = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ThreadRow<T> row = thread_row<T>(p, tile, L::row(half), keys);
#pragma unroll
    for (int n = 0; n < L::kTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int e = 2 * half + j;
        const Score<T> x = score(p, terms, row, keys, L::key(n, j), s[n][e]);
        s[n][e] = x.value;
        masked |= uint32_t(x.state == kMasked) << (4 * n + e);
      }
  }
  return masked;
}

// Raises the rows' maxima to those of the scores s, turns s into exp(s - maximum) and adds it to the sums; returns by how much what was
// summed before has to be multiplied. The four lanes that share two rows end up with the same numbers.
template <class C, class T>
struct Rescale {
  T factor[2];
};
template <class C, class T>
SCALEDOT_DEVICE Rescale<C, T> exponentiate(RowState<T> (&state)[2], uint32_t masked,
                                           T (&s)[Lane<C, kForwardColumnWarps>::kTiles][4]) {
  using L = Lane<C, kForwardColumnWarps>;
  Rescale<C, T> result;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    T highest = state[half].maximum;
#pragma unroll
    for (int n = 0; n < L::kTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) highest = max(highest, s[n][2 * half + j]);
    highest = max(highest, shuffle_xor(highest, 1));
    highest = max(highest, shuffle_xor(highest, 2));
    const T factor = highest == state[half].maximum ? T(1) : weight_exp<C>(state[half].maximum - highest);
    const T base = shift(highest);
    T sum = T(0);
#pragma unroll
    for (int n = 0; n < L::kTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        T& x = s[n][2 * half + j];
        x = masked >> (4 * n + 2 * half + j) & 1 ? T(0) : weight_exp<C>(rounded_subtract(x, base));
        sum += x;
      }
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    state[half] = {highest, state[half].sum * factor + sum};
    result.factor[half] = factor;
  }
  return result;
}

// Dropped weights become 0, NaN stays NaN.
template <class L, class T>
SCALEDOT_DEVICE void drop(const Problem& p, const RowTile& tile, Range keys, T (&s)[L::kTiles][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t kept = kept_bits<L>(p, tile, thread_row<T>(p, tile, L::row(half), keys), keys);
#pragma unroll
    for (int n = 0; n < L::kTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (!(kept >> (2 * n + j) & 1)) s[n][2 * half + j] *= T(0);
  }
}

template <class C>
SCALEDOT_KERNEL((kThreads<C, kForwardColumnWarps>))
forward_kernel(SCALEDOT_PARAM Problem given, SCALEDOT_PARAM ForwardPlan<typename C::T> plan) {
  using Storage = typename C::Storage;
  using T = typename C::T;
  using L = Lane<C, kForwardColumnWarps>;
  using Place = Stage<C, kThreads<C, kForwardColumnWarps>>;
  using KeyPlace = Stage<C, kThreads<C, kForwardColumnWarps>, C::kPacked>;
  constexpr int kOutTiles = C::kPanel / 8;
  auto& shared = *static_cast<ForwardShared<C>*>(shared_memory());
  ForwardTask task = forward_task(block_index(), plan.tiling, plan.panels, plan.splits);
  const Problem& p = problem_of_block<C, kThreads<C, kForwardColumnWarps>>(given, task.plane, &shared + 1);
  const RowTile tile = row_tile(p, plan.tiling, task.plane, task.tile);
  if (is_empty<C>(tile)) return;
  const int head_panels = panels_of(p.head_dim, C::kPanel);
  const int64_t split_keys = plan.split_tiles * C::kSide;
  const Range range = key_tiles_of(
      intersect(key_range(p, tile.rows), {task.split * split_keys, (task.split + 1) * split_keys}), C::kSide);
  const bool active = L::warp_row() < tile_rows(tile);

  Place query = {shared.query, rows_of_tile<C>(p, p.query, tile, p.head_dim), -1};
  KeyPlace key = {shared.key, {}, -1}, value = {shared.value, {}, -1};
  bool arriving = false;
  T out[kOutTiles][4];
  clear(out);
  RowState<T> state[2] = {empty_row<T>(), empty_row<T>()};
  const int out_width = panel_width(p.value_dim, task.panel, C::kPanel);

  const auto point_to_keys = [&](KeyPlace& place, const TensorView& view, int64_t t, int64_t cols) {
    place.point_to(rows_of_keys<C, C::kPacked>(p, view, tile.batch, tile.kv_head, key_tile(p, t, C::kSide), cols));
  };
  if (range.begin < range.end) point_to_keys(key, p.key, range.begin, p.head_dim);
  for (int64_t t = range.begin; t < range.end; ++t) {
    const Range keys = key_tile(p, t, C::kSide);
    const TileTerms<T> terms = tile_terms<C>(p, tile, keys);

    // S = Q K^T; the values arrive meanwhile.
    T s[L::kTiles][4];
    clear(s);
    const auto request_values = [&] {
      point_to_keys(value, p.value, t, p.value_dim);
      value.request(task.panel);
      arriving = true;
    };
    for (int c = 0; c < head_panels; ++c) {
      bring(query, c, key, c, arriving);
      if (c == head_panels - 1) request_values();
      if (active)
        multiply<ALayout::rows, BLayout::by_column>(
            s, Operand<Storage>{query.data + L::warp_row() * C::kPitch, C::kPitch},
            Operand<Storage>{key.data, C::kPitch}, panel_width(p.head_dim, c, C::kPanel), L::kTiles);
    }
    if (head_panels == 0) {
      barrier();
      request_values();
    }

    // The next keys arrive while the rest is done with these.
    bring(value, task.panel, value, task.panel, arriving);
    if (t + 1 < range.end && head_panels > 0) {
      point_to_keys(key, p.key, t + 1, p.head_dim);
      key.request(0);
      if (query.panel != 0) query.request(0);
      arriving = true;
    }

    uint32_t masked = 0;
    if (active) {
      masked = finish_scores<C, kForwardColumnWarps>(p, tile, terms, keys, s);
      const Rescale<C, T> rescale = exponentiate<C>(state, masked, s);
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[n][e] *= rescale.factor[e / 2];
      if (terms.drops) drop<L>(p, tile, keys, s);
    }
    const bool finite = !terms.masks || value.finite();
    if (active) {
      store_tile<C, kForwardColumnWarps>(shared.weights, s, masked, terms.masks);
      warp_barrier();
      multiply_weights<ALayout::rows>(
          finite, out, Operand<Storage>{shared.weights + L::warp_row() * C::kScorePitch, C::kScorePitch},
          Operand<Storage>{value.data, C::kPitch}, int(round_up(count(keys), 16)), out_width / 8);
    }
  }
  if (arriving) cp_async_wait_all();

  // Results.
  const T kept = T(1.0 / (1.0 - p.dropout_p));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ThreadRow<T> row = thread_row<T>(p, tile, L::row(half), {0, 0});
    if (!row.there) continue;
    if (plan.splits > 1) {
      const int64_t part = block_index() * C::kSide + L::row(half);
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) global_store(plan.parts + part * C::kPanel + L::column(n, j), out[n][2 * half + j]);
      if (lane_index() % 4 == 0) global_store(plan.part_states + part, state[half]);
      continue;
    }
    const T factor = normaliser(state[half]) * kept;
    Storage* output = at<Storage>(p, p.output, tile.batch, row.head) + row.i * p.output.row_stride;
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int64_t col = int64_t(task.panel) * C::kPanel + L::column(n, j);
        if (col >= p.value_dim) continue;
        Storage x;
        narrow(out[n][2 * half + j] * factor, x);
        global_store(output + col * p.output.col_stride, x);
      }
    if (task.panel != 0 || lane_index() % 4 != 0) continue;
    if (p.lse.data)
      global_store(at<T>(p, p.lse, tile.batch, row.head) + row.i * p.lse.row_stride, logsumexp(state[half]));
    if (plan.states) global_store(plan.states + row_number(p, tile, row), state[half]);
  }
}

// The parts of one tile and panel, merged in order:  m = max m_k,  w_k = exp(m_k - m),  O = sum w_k O_k / sum w_k l_k
constexpr int kMergeThreads = 128;
template <class C>
SCALEDOT_KERNEL(kMergeThreads)
merge_kernel(SCALEDOT_PARAM Problem given, SCALEDOT_PARAM ForwardPlan<typename C::T> plan) {
  using Storage = typename C::Storage;
  using T = typename C::T;
  ForwardTask task = forward_task(block_index(), plan.tiling, plan.panels, 1);
  const Problem& p = problem_of_block<C, kMergeThreads>(given, task.plane, shared_memory());
  const RowTile tile = row_tile(p, plan.tiling, task.plane, task.tile);
  if (is_empty<C>(tile)) return;
  const T kept = T(1.0 / (1.0 - p.dropout_p));
  for (int k = thread_index(); k < tile_rows(tile) * C::kPanel; k += kMergeThreads) {
    const int r = k / C::kPanel, within = k % C::kPanel;
    const int64_t col = int64_t(task.panel) * C::kPanel + within;
    RowState<T> total = empty_row<T>();
    T out = T(0);
    for (int64_t split = 0; split < plan.splits; ++split) {
      const int64_t part = (block_index() * plan.splits + split) * C::kSide + r;
      const RowState<T> state = global_load(plan.part_states + part);
      if (state.sum == T(0)) continue;
      const T maximum = max(total.maximum, state.maximum);
      const T before = total.sum == T(0) ? T(0) : exp(total.maximum - maximum);
      const T factor = state.maximum == maximum ? T(1) : exp(state.maximum - maximum);
      total = {maximum, total.sum * before + state.sum * factor};
      out = out * before + global_load(plan.parts + part * C::kPanel + within) * factor;
    }
    const ThreadRow<T> row = thread_row<T>(p, tile, r, {0, 0});
    if (col < p.value_dim) {
      Storage x;
      narrow(out * normaliser(total) * kept, x);
      global_store(
          at<Storage>(p, p.output, tile.batch, row.head) + row.i * p.output.row_stride + col * p.output.col_stride, x);
    }
    if (col != 0) continue;
    if (p.lse.data) global_store(at<T>(p, p.lse, tile.batch, row.head) + row.i * p.lse.row_stride, logsumexp(total));
    if (plan.states) global_store(plan.states + row_number(p, tile, row), total);
  }
}

// One tile of weights, masked and skipped ones included.
template <class C>
SCALEDOT_KERNEL((kThreads<C, kForwardColumnWarps>))
weights_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM ForwardPlan<typename C::T> plan) {
  using Storage = typename C::Storage;
  using T = typename C::T;
  using L = Lane<C, kForwardColumnWarps>;
  using Place = Stage<C, kThreads<C, kForwardColumnWarps>>;
  auto& shared = *static_cast<ScoresShared<C>*>(shared_memory());
  const int64_t key_tiles = ceil_div(p.key_length, C::kSide);
  const ForwardTask task = forward_task(block_index() / key_tiles, plan.tiling, 1, 1);
  const RowTile tile = row_tile(p, plan.tiling, task.plane, task.tile);
  const Range keys = key_tile(p, block_index() % key_tiles, C::kSide);
  const TileTerms<T> terms = tile_terms<C>(p, tile, keys);

  T s[L::kTiles][4];
  clear(s);
  Place query = {shared.query, rows_of_tile<C>(p, p.query, tile, p.head_dim), -1};
  Place key = {shared.key, rows_of_keys<C>(p, p.key, tile.batch, tile.kv_head, keys, p.head_dim), -1};
  bool arriving = false;
  const bool skipped = tile_kind(p, tile.rows, keys) == TileKind::skip;  // all 0, whatever the products
  for (int c = 0; c < panels_of(p.head_dim, C::kPanel) && !skipped; ++c) {
    bring(query, c, key, c, arriving);
    multiply<ALayout::rows, BLayout::by_column>(s, Operand<Storage>{query.data + L::warp_row() * C::kPitch, C::kPitch},
                                                Operand<Storage>{key.data, C::kPitch},
                                                panel_width(p.head_dim, c, C::kPanel), L::kTiles);
  }
  const uint32_t masked = finish_scores<C, kForwardColumnWarps>(p, tile, terms, keys, s);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ThreadRow<T> row = thread_row<T>(p, tile, L::row(half), keys);
    if (!row.there) continue;
    const RowState<T> state = global_load(plan.states + row_number(p, tile, row));
    const T inverse = normaliser(state) * terms.kept;
    const uint32_t kept = terms.drops ? kept_bits<L>(p, tile, row, keys) : ~uint32_t(0);
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

// ---------------------------------------------------------------------------------------------------- host
template <class C>
ForwardPlan<typename C::T> plan_forward(const Problem& p, Arena& arena) {
  using T = typename C::T;
  ForwardPlan<T> plan = {};
  plan.tiling = tile_rows_of(p, C::kSide, true);
  plan.panels = max<int64_t>(panels_of(p.value_dim, C::kPanel), 1);
  const int64_t blocks = p.batch * p.kv_heads * tiles_per_plane(plan.tiling) * plan.panels;
  const int64_t tiles = ceil_div(p.key_length, C::kSide);
  int64_t wanted = min(ceil_div(kWantedBlocks, max<int64_t>(blocks, 1)), tiles / kLeastSplitTiles);
  if (p.packed.max_splits > 0) wanted = min(wanted, p.packed.max_splits);
  plan.split_tiles = ceil_div(tiles, max<int64_t>(wanted, 1));
  plan.splits = max<int64_t>(ceil_div(tiles, max<int64_t>(plan.split_tiles, 1)), 1);
  if (p.weights.data) plan.states = take<RowState<T>>(arena, row_count(p));
  if (plan.splits > 1) {
    plan.parts = take<T>(arena, blocks * plan.splits * C::kSide * C::kPanel);
    plan.part_states = take<RowState<T>>(arena, blocks * plan.splits * C::kSide);
  }
  return plan;
}

template <class C>
const char* run_weights(const Problem& p, const ForwardPlan<typename C::T>& plan, DeviceStream stream) {
  const int64_t tiles = p.batch * p.kv_heads * tiles_per_plane(plan.tiling);
  return launch(weights_kernel<C>, tiles * ceil_div(p.key_length, C::kSide), kThreads<C, kForwardColumnWarps>,
                sizeof(ScoresShared<C>), stream, p, plan);
}

template <class C>
const char* run_forward(const Problem& p, const DeviceExecutor& executor) {
  Arena arena = {static_cast<char*>(executor.workspace), 0};
  const ForwardPlan<typename C::T> plan = plan_forward<C>(p, arena);
  const int64_t tiles = p.batch * p.kv_heads * tiles_per_plane(plan.tiling);
  constexpr int kBlock = kThreads<C, kForwardColumnWarps>;
  const char* error = launch(forward_kernel<C>, tiles * plan.panels * plan.splits, kBlock,
                             kSharedBytes<C, ForwardShared<C>>, executor.stream, p, plan);
  if (!error && plan.splits > 1)
    error = launch(merge_kernel<C>, tiles * plan.panels, kMergeThreads, C::kPacked ? sizeof(Problem) : 0,
                   executor.stream, p, plan);
  if constexpr (!C::kPacked)
    if (!error && p.weights.data) error = run_weights<C>(p, plan, executor.stream);
  return error;
}

}  // namespace
}  // namespace scaledot
