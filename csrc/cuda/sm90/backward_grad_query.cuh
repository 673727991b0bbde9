// The way of grad_query in the backward: from the consumers' registers to shared memory, from there to float32 sums in
// global memory, and after the last block to the result.
//
// Blocks add to a row tile's sums one after the other, the last keys first (backward_turn), so that results have the
// same bits every time (ptx/semaphore.h). The first of them stores its sums, so nobody clears the memory before.
#pragma once

#include "cuda/ptx/semaphore.h"
#include "cuda/ptx/sync.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90/backward_prepare.cuh"
#include "cuda/sm90/backward_tasks.cuh"
#include "cuda/store_rows.cuh"

namespace scaledot {
namespace {

// A consumer writes its sums of one part of its columns to shared memory, for the adding warp. `first`: the first of
// the block.
template <class C>
SCALEDOT_DEVICE void publish_grad_query(Sm90BackwardShared<C>& shared, int group, bool first,
                                        const float (&sums)[C::kGradQueryPartCols / 2]) {
  using Four = AlignedVector<float, 4>;
  if (!first) named_barrier_wait(kSumsTaken + group, kWarpgroupThreads + kWarpSize);
  Four* to = reinterpret_cast<Four*>(shared.grad_query[group]) + thread_index() % kWarpgroupThreads;
#pragma unroll
  for (int n = 0; n < C::kGradQueryPartCols / 8; ++n)
    shared_store(to + n * kWarpgroupThreads, Four{{sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3]}});
  fence_async();
  named_barrier_arrive(kSumsReady + group, kWarpgroupThreads + kWarpSize);
}

// One warp: adds what the consumers publish to grad_query, when the row tile's semaphore has reached this key tile. The
// sums of all consumers are on their way before the first of them is waited for.
template <class C>
SCALEDOT_DEVICE void accumulate_grad_query(const Sm90BackwardPlan& plan, const Sm90BackwardTask& task,
                                           Sm90BackwardShared<C>& shared) {
  constexpr int kPartSums = kWgmmaRows * C::kGradQueryPartCols;
  static_assert(C::kConsumers == 2);
  const int turn = backward_turn(shared_load(&task.key_tiles), shared_load(&task.tile));
  for_each_step(task, [&](const Sm90BackwardStep& step) {
    const int64_t tile = tile_number(task, step);
#pragma unroll 1
    for (int part = 0; part < C::kGradQueryParts; ++part) {
      int* semaphore = plan.semaphores + tile * C::kGradQueryParts + part;
      const bool stores = lane_index() == 0 && semaphore_wait(semaphore, turn);
      warp_barrier();
#pragma unroll 1
      for (int group = 0; group < C::kConsumers; ++group) {
        named_barrier_wait(kSumsReady + group, kWarpgroupThreads + kWarpSize);
        if (lane_index() == 0) {
          float* to = plan.grad_query + ((tile * C::kConsumers + group) * C::kGradQueryParts + part) * kPartSums;
          if (stores)
            bulk_store(to, shared.grad_query[group], kPartSums * int(sizeof(float)));
          else
            bulk_reduce_add(to, shared.grad_query[group], kPartSums * int(sizeof(float)));
          bulk_commit();
        }
      }
      const bool is_read_again = part + 1 < C::kGradQueryParts || !is_last(task, step);
      const auto give_back = [&](int group) {
        warp_barrier();
        if (is_read_again) named_barrier_arrive(kSumsTaken + group, kWarpgroupThreads + kWarpSize);
      };
      if (lane_index() == 0) bulk_wait_read<1>();
      give_back(0);
      if (lane_index() == 0) bulk_wait_read<0>();
      give_back(1);
      if (lane_index() == 0) {
        bulk_wait<0>();
        semaphore_release(semaphore, turn);
      }
      warp_barrier();
    }
  });
}

// Pieces of a row tile's sums that a warp converts: 16 rows and 32 columns.
template <class C>
struct Sm90GradQueryPieces {
  static constexpr int kWarps = kWarpgroupThreads / kWarpSize, kGroups = C::kGradQueryCols / 8;
  static constexpr int kPieces = C::kConsumers * (kGroups / kQuadLanes) * kWarps;
};

// The warp loads a piece as the accumulator that it was. `written`: false if no key tile has added to the row tile.
template <class C>
SCALEDOT_DEVICE void store_grad_query_piece(const Problem& p, const Sm90BackwardPlan& plan, const Sm90RowTile& tile,
                                            int64_t number, int piece, bool written) {
  using Storage = typename C::Storage;
  using Four = AlignedVector<float, 4>;
  using Pieces = Sm90GradQueryPieces<C>;
  constexpr int kAcross = Pieces::kGroups / kQuadLanes;  // pieces
  const int thread = piece % Pieces::kWarps * kWarpSize + lane_index(), across = piece / Pieces::kWarps;
  const int share = across / kAcross, group = across % kAcross * kQuadLanes;
  const Four* from = reinterpret_cast<const Four*>(plan.grad_query) +
                     ((number * C::kConsumers + share) * Pieces::kGroups + group) * kWarpgroupThreads + thread;
  Four sums[kQuadLanes];
#pragma unroll
  for (int n = 0; n < kQuadLanes; ++n) sums[n] = written ? global_load(from + n * kWarpgroupThreads) : Four{};

  const int64_t first_row = tile.tile * C::kRows + (C::kSplitsRows ? share * kWgmmaRows : 0);
  const int first_col = (C::kSplitsRows ? 0 : share * C::kGradQueryCols) + 8 * group;
  Storage* to =
      element_ptr<Storage>(p, p.grad_query, tile.batch, tile.head) + tile.rows.first * p.grad_query.row_stride;
  const RowPair<Storage> rows =
      row_pair(p.grad_query, p.head_dim, to, first_row + grad_query_position(thread, 0, 0).row, tile.rows.count);
  bool nan = false;
  store_row_pair<kQuadLanes>(rows, first_col, [&](int n, int half) {
    const float* of = sums[n].x + 2 * half;
    nan |= rows.to[half] && first_col + 8 * n < p.head_dim && (of[0] != of[0] || of[1] != of[1]);
    return narrow_pair(of[0] * float(p.scale), of[1] * float(p.scale), Type<Storage>{});
  });
  if (plan.has_nan && nan) global_store(plan.has_nan, 1);
}

// The last kernel: grad_query = scale times the sums.
template <class C>
SCALEDOT_KERNEL(kRowThreads)
sm90_store_grad_query_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM Sm90BackwardPlan plan) {
  const int64_t tiles = row_tile_count<C>(p, plan);
  for (int64_t number = block_index(); number < tiles; number += block_count()) {
    const Sm90RowTile tile = row_tile<C>(p, plan, number);
    const bool written = global_load(plan.semaphores + number * C::kGradQueryParts) >= 0;
#pragma unroll 1
    for (int piece = warp_index(); piece < Sm90GradQueryPieces<C>::kPieces; piece += kRowThreads / kWarpSize)
      store_grad_query_piece<C>(p, plan, tile, number, piece, written);
  }
}

}  // namespace
}  // namespace scaledot
