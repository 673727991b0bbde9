// What the warps of a backward block go through together: its tile of keys, and tile by tile the rows that attend to
// it. Then the two warps beside the consumers: one loads what they read, one adds what they leave of grad_query to sums
// in global memory.
#pragma once

#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90/backward_rows.cuh"
#include "cuda/sm90/tensors.h"

namespace scaledot {
namespace {

struct Sources {
  Source query, key, value, grad_output;
};

enum : int {
  kAllConsumers = 1,
  kSumsReady = 2,
  kSumsTaken = 4,
  kOneConsumer = 6
};  // barriers; + warpgroup, but the first

template <class C>
SCALEDOT_FN BackwardTask backward_task(const Problem& p, int64_t key_tiles, int64_t index, int first_row_tile,
                                       int end_row_tile) {
  const int plane = int(index / key_tiles), tile = int(index % key_tiles), heads = int(p.heads / p.kv_heads);
  const int batch = plane / int(p.kv_heads), kv_head = plane % int(p.kv_heads);
  return {batch,
          kv_head,
          tile,
          first_row_tile,
          end_row_tile,
          kv_head * heads,
          (kv_head + 1) * heads,
          backward_band(p, backward_keys(p, tile, C::kKeys))};
}

// One of its tiles of rows.
struct BackwardStep {
  int head, row_tile;
  uint32_t number;  // of the block's steps, from 0: rings of stages go round with it
};

// Calls body(step) for each, in the same order in all warps. The task stays in shared memory: it would take registers.
template <class Body>
SCALEDOT_DEVICE void for_each_step(const BackwardTask& task, const Body& body) {
  BackwardStep step = {shared_load(&task.first_head), shared_load(&task.first_row_tile), 0};
  if (step.row_tile >= shared_load(&task.end_row_tile)) return;
#pragma unroll 1
  do {
    body(step);
    ++step.number;
    if (++step.row_tile == shared_load(&task.end_row_tile))
      ++step.head, step.row_tile = shared_load(&task.first_row_tile);
  } while (step.head < shared_load(&task.end_head));
}
SCALEDOT_DEVICE bool is_last(const BackwardTask& task, const BackwardStep& step) {
  return step.head + 1 == shared_load(&task.end_head) && step.row_tile + 1 == shared_load(&task.end_row_tile);
}

// Number of a tile of rows among those of all planes.
SCALEDOT_DEVICE int64_t tile_number(const Problem& p, const BackwardPlan90& plan, const BackwardTask& task,
                                    const BackwardStep& step) {
  return (shared_load(&task.batch) * p.heads + step.head) * plan.row_tiles + step.row_tile;
}

template <class C>
SCALEDOT_DEVICE void make_barriers(BackwardShared90<C>& shared) {
  constexpr int kWarps = C::kConsumers * kWarpgroupThreads / kWarpSize;
  mbarrier_init(&shared.loaded, 1);
  const auto make_ring = [&](uint64_t* full, uint64_t* empty, int stages) {
    for (int stage = 0; stage < stages; ++stage) {
      mbarrier_init(full + stage, 1);
      mbarrier_init(empty + stage, kWarps);
    }
  };
  make_ring(shared.query_full, shared.query_empty, C::kQueryStages);
  make_ring(shared.grad_full, shared.grad_empty, C::kGradStages);
  mbarrier_init_fence();
}

// ---------------------------------------------------------------------------------------------------- loading
template <class C>
SCALEDOT_DEVICE void load_panels(typename C::Storage* to, const Source& from, int rows, uint64_t* mbarrier, int row,
                                 int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < C::kPanels; ++panel)
    tensor_load(to + panel * rows * kPanelCols, from.map, mbarrier, panel * kPanelCols, row, head * from.head_step,
                batch * from.batch_step);
}

// One thread: everything the consumers read.
template <class C>
SCALEDOT_DEVICE void load_tiles(const Problem& p, const BackwardPlan90& plan, const Sources& from,
                                const BackwardTask& task, BackwardShared90<C>& shared) {
  constexpr int kKeyBytes = C::kKeys * C::kDim * 2, kRowBytes = C::kRows * C::kDim * 2;
  constexpr int kTermBytes = C::kRows * int(sizeof(RowTerms));
  constexpr int kPositionBytes = C::kGeneral ? C::kRows * int(sizeof(RowPosition)) : 0;
  const int first_key = shared_load(&task.tile) * C::kKeys, kv_head = shared_load(&task.kv_head);
  const int batch = shared_load(&task.batch);
  mbarrier_arrive_expect(&shared.loaded, 2 * kKeyBytes);
  load_panels<C>(shared.key, from.key, C::kKeys, &shared.loaded, first_key, kv_head, batch);
  load_panels<C>(shared.value, from.value, C::kKeys, &shared.loaded, first_key, kv_head, batch);
  for_each_step(task, [&](const BackwardStep& step) {
    const Ring<C::kQueryStages> queries = {step.number};
    const Ring<C::kGradStages> grads = {step.number};
    const int row = step.row_tile * C::kRows;
    const int64_t padded = tile_number(p, plan, task, step) * C::kRows;

    uint64_t* full = &shared.query_full[queries.stage()];
    mbarrier_wait(&shared.query_empty[queries.stage()], queries.phase() ^ 1);
    mbarrier_arrive_expect(full, kRowBytes + kTermBytes + kPositionBytes);
    load_panels<C>(shared.query[queries.stage()], from.query, C::kRows, full, row, step.head, batch);
    bulk_load(shared.terms[queries.stage()], plan.terms + padded, kTermBytes, full);
    if constexpr (C::kGeneral)
      bulk_load(shared.positions[queries.stage()], plan.positions + padded, kPositionBytes, full);

    full = &shared.grad_full[grads.stage()];
    mbarrier_wait(&shared.grad_empty[grads.stage()], grads.phase() ^ 1);
    mbarrier_arrive_expect(full, kRowBytes);
    load_panels<C>(shared.grad_output[grads.stage()], from.grad_output, C::kRows, full, row, step.head, batch);
  });
}

// ---------------------------------------------------------------------------------------------------- grad_query
// A consumer's sums of one part of its columns, to where the adding warp takes them from. `first`: of all that it
// leaves there.
template <class C>
SCALEDOT_DEVICE void leave_sums(BackwardShared90<C>& shared, int group, bool first,
                                const float (&sums)[C::kPartCols / 2]) {
  using Four = Few<float, 4>;
  if (!first) named_barrier_wait(kSumsTaken + group, kWarpgroupThreads + kWarpSize);
  Four* to = reinterpret_cast<Four*>(shared.grad_query[group]) + thread_index() % kWarpgroupThreads;
#pragma unroll
  for (int n = 0; n < C::kPartCols / 8; ++n)
    shared_store(to + n * kWarpgroupThreads, Four{{sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3]}});
  fence_async();
  named_barrier_arrive(kSumsReady + group, kWarpgroupThreads + kWarpSize);
}

// One warp: adds what the consumers leave in shared memory to grad_query, when it is this block's turn.
template <class C>
SCALEDOT_DEVICE void add_grad_query(const Problem& p, const BackwardPlan90& plan, const BackwardTask& task,
                                    BackwardShared90<C>& shared) {
  constexpr int kPartSums = C::kRows * C::kPartCols;
  for_each_step(task, [&](const BackwardStep& step) {
    const int64_t tile = tile_number(p, plan, task, step);
#pragma unroll 1
    for (int part = 0; part < C::kParts; ++part) {
      int* turn = plan.turns + tile * C::kParts + part;
      if (lane_index() == 0) turn_wait(turn, shared_load(&task.tile));
      warp_barrier();
#pragma unroll 1
      for (int group = 0; group < C::kConsumers; ++group) {
        named_barrier_wait(kSumsReady + group, kWarpgroupThreads + kWarpSize);
        if (lane_index() == 0) {
          bulk_reduce_add(plan.grad_query + ((tile * C::kConsumers + group) * C::kParts + part) * kPartSums,
                          shared.grad_query[group], kPartSums * int(sizeof(float)));
          bulk_commit();
          bulk_wait_read<0>();
        }
        warp_barrier();
        if (part + 1 < C::kParts || !is_last(task, step))
          named_barrier_arrive(kSumsTaken + group, kWarpgroupThreads + kWarpSize);
      }
      if (lane_index() == 0) {
        bulk_wait<0>();
        turn_end(turn);
      }
      warp_barrier();
    }
  });
}

}  // namespace
}  // namespace scaledot
