// The last kernel of the backward for sm_90: grad_query from its sums, and gradients that have NaN once more.
//
//   dQ = scale times the sums
//
// If scores may be masked, the generic kernels' code, which leaves out masked terms exactly, computes anew: tiles of
// grad_query among which a block has found NaN, and all of grad_key and grad_value if either has NaN. The host does not
// know. One kernel for both saves a launch. That code takes most of its registers, so few warps run at the same time:
// each loads the next sums before it stores these.
#pragma once

#include "cuda/generic/backward.cuh"
#include "cuda/ptx/launch.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90/backward_packed.cuh"
#include "cuda/store_rows.cuh"

namespace scaledot {
namespace {

// Panels of 64 columns for every head dimension: a wider panel would spill registers in these loops.
template <class Storage, bool kPacked>
using AgainConfig = GenericConfig<Storage, 64, kPacked, !kPacked>;

// A piece of a row tile's sums, which a warp converts: 16 rows and 32 columns, loaded as the accumulator that it was.
struct Sm90GradQueryPiece {
  AlignedVector<float, 4> sums[kQuadLanes];
  int thread, share, group;  // that had them: in its warpgroup; warpgroup; first group of 8 columns
};
constexpr int kPieceWarps = kWarpgroupThreads / kWarpSize, kPieceConsumers = 2;
SCALEDOT_DEVICE int piece_count(const Sm90BackwardPlan& plan) {
  return kPieceConsumers * kPieceWarps * (plan.grad_query_cols / (8 * kQuadLanes));
}

// `number`: of the row tile.
SCALEDOT_DEVICE Sm90GradQueryPiece load_piece(const Sm90BackwardPlan& plan, int64_t number, int index) {
  const int groups = plan.grad_query_cols / 8, rest = index / kPieceWarps, across = groups / kQuadLanes;
  Sm90GradQueryPiece piece = {
      {}, index % kPieceWarps * kWarpSize + lane_index(), rest / across, rest % across * kQuadLanes};
  // Nobody has stored sums if no key tile has added to the row tile.
  if (global_load(plan.semaphores + number * plan.grad_query_parts) < 0) return piece;
  const auto* from = reinterpret_cast<const AlignedVector<float, 4>*>(plan.grad_query) +
                     ((number * kPieceConsumers + piece.share) * groups + piece.group) * kWarpgroupThreads +
                     piece.thread;
#pragma unroll
  for (int n = 0; n < kQuadLanes; ++n) piece.sums[n] = global_load(from + n * kWarpgroupThreads);
  return piece;
}

// Returns whether the thread has stored NaN.
template <class Storage, bool kPacked>
SCALEDOT_DEVICE bool store_piece(const Problem& p, const Sm90BackwardPlan& plan, int64_t number,
                                 const Sm90GradQueryPiece& piece) {
  const Sm90RowTile tile = row_tile<kPacked>(p, plan, number, plan.row_tile_rows);
  const bool splits_rows = plan.row_tile_rows > kWgmmaRows;
  const int64_t first_row = tile.tile * plan.row_tile_rows + (splits_rows ? piece.share * kWgmmaRows : 0);
  const int first_col = (splits_rows ? 0 : piece.share * plan.grad_query_cols) + 8 * piece.group;
  Storage* to =
      element_ptr<Storage>(p, p.grad_query, tile.batch, tile.head) + tile.rows.first * p.grad_query.row_stride;
  const RowPair<Storage> rows =
      row_pair(p.grad_query, p.head_dim, to, first_row + grad_query_position(piece.thread, 0, 0).row, tile.rows.count);
  bool nan = false;
  store_row_pair<kQuadLanes>(rows, first_col, [&](int n, int half) {
    const float* of = piece.sums[n].x + 2 * half;
    nan |= rows.to[half] && first_col + 8 * n < p.head_dim && (of[0] != of[0] || of[1] != of[1]);
    return narrow_pair(of[0] * float(p.scale), of[1] * float(p.scale), Type<Storage>{});
  });
  return nan;
}

// The block's row tiles. Returns whether the thread has stored NaN.
template <class Storage, bool kPacked>
SCALEDOT_DEVICE bool store_grad_query(const Problem& p, const Sm90BackwardPlan& plan, int64_t tiles) {
  constexpr int kWarps = kRowThreads / kWarpSize, kAtOnce = 2;  // pieces of a warp: 32 KiB of a block are on their way
  const int pieces = piece_count(plan);                         // a multiple of both
  const auto load = [&](int64_t number, int index, Sm90GradQueryPiece(&to)[kAtOnce]) {
    if (number >= tiles) return;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) to[k] = load_piece(plan, number, index + k * kWarps);
  };
  int index = warp_index();
  bool nan = false;
  Sm90GradQueryPiece now[kAtOnce], next[kAtOnce];
  load(block_index(), index, next);
#pragma unroll 1
  for (int64_t number = block_index(); number < tiles;) {
    const int64_t of = number;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) now[k] = next[k];
    index += kAtOnce * kWarps;
    if (index >= pieces) index -= pieces, number += block_count();
    load(number, index, next);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) nan |= store_piece<Storage, kPacked>(p, plan, of, now[k]);
  }
  return nan;
}

// grad_query of a row tile once more.
template <class C>
SCALEDOT_DEVICE void compute_grad_query_again(const Problem& p, const GenericBackwardPlan<float>& again,
                                              const Sm90RowTile& tile, int rows) {
  const int64_t group = p.heads / p.kv_heads, batch = C::kPacked ? tile.sequence.sequence : tile.batch;
  const int64_t kv_group = batch * p.kv_heads + tile.head / group;
  const int64_t first = tile.tile * (rows / C::kSide);  // of the generic kernels' tiles
  for (int64_t t = first; t < min(first + rows / C::kSide, again.tiling.row_tiles); ++t) {
    const int64_t index = (again.tiling.row_tiles - 1 - t) * group + tile.head % group;  // as query_tile counts
    for (int panel = 0; panel < again.panels; ++panel) {
      barrier();
      compute_grad_query<C>(p, again, (kv_group * tiles_per_kv_group(again.tiling) + index) * again.panels + panel);
    }
  }
}

// `of_query`, `of_key`: for grad_query, and for grad_key and grad_value, which have `key_blocks` blocks.
template <class Storage, bool kPacked>
SCALEDOT_KERNEL(kRowThreads)
sm90_finish_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM Sm90BackwardPlan plan,
                   SCALEDOT_PARAM GenericBackwardPlan<float> of_query, SCALEDOT_PARAM GenericBackwardPlan<float> of_key,
                   int64_t key_blocks) {
#if SCALEDOT_SM90
  using C = AgainConfig<Storage, kPacked>;
  static_assert((kThreads<C, kBackwardColumnWarps>) == kRowThreads);
  const int64_t tiles = plan.grad_query ? row_tile_count<kPacked>(p, plan) : 0;
  const bool nan = store_grad_query<Storage, kPacked>(p, plan, tiles);
  if (!plan.has_nan) return;
  if (barrier_or(nan)) {
#pragma unroll 1
    for (int64_t number = block_index(); number < tiles; number += block_count())
      compute_grad_query_again<C>(p, of_query, row_tile<kPacked>(p, plan, number, plan.row_tile_rows),
                                  plan.row_tile_rows);
  }
  if (global_load(plan.has_nan) == 0) return;
#pragma unroll 1
  for (int64_t block = block_index(); block < key_blocks; block += block_count()) {
    barrier();
    compute_grad_key_value<C>(p, of_key, block);
  }
#endif
}

template <class Storage, bool kPacked>
const char* launch_finish(const Problem& p, const Sm90BackwardPlan& plan, int64_t row_tiles, DeviceStream stream) {
  using C = AgainConfig<Storage, kPacked>;
  GenericBackwardPlan<float> of_query = {}, of_key = {};
  of_query.rows = of_key.rows = plan.rows;
  of_query.tiling = query_tiling(p, C::kSide, false);
  of_query.panels = panels_of(p.head_dim, C::kPanel);
  of_key.tiling = query_tiling(p, C::kSide, true);
  of_key.panels = panels_of(max(p.head_dim, p.value_dim), C::kPanel);
  const bool may_repeat = plan.has_nan && (p.grad_key.data || p.grad_value.data);
  const int64_t key_blocks = may_repeat ? p.batch * p.kv_heads * ceil_div(p.key_length, C::kSide) * of_key.panels : 0;
  const int64_t blocks = max(plan.grad_query ? row_tiles : 0, key_blocks);
  return launch(sm90_finish_kernel<Storage, kPacked>, min<int64_t>(blocks, device_traits().multiprocessors),
                kRowThreads, kSharedBytes<C, GenericBackwardShared<C>>, stream, p, plan, of_query, of_key, key_blocks);
}

}  // namespace
}  // namespace scaledot
