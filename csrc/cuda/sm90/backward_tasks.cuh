// The steps that the warps of a backward block take together: a task, which is a tile of keys, and step by step the
// tiles of rows that may attend to it.
#pragma once

#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90/backward_packed.cuh"

namespace scaledot {
namespace {

// Named barriers. All but the first exist once a consumer: the number + warpgroup.
enum : int {
  kAllConsumers = 1,
  kSumsReady = 2,  // a consumer's part of grad_query is in shared memory
  kSumsTaken = 4,  // and has been read
  kOneConsumer = 6,
};

// Task `index` of the grid, in the order of the turns, or of the packed sequence that `p` is. row_ranges: of its key
// tiles, of which a head has key_tiles.
template <class C>
SCALEDOT_DEVICE Sm90BackwardTask sm90_backward_task(const Problem& p, const int* row_ranges, int64_t key_tiles,
                                                    int64_t index) {
  const int kv_group = int(index / key_tiles), tile = int(key_tiles - 1 - index % key_tiles);
  const int batch = kv_group / int(p.kv_heads), kv_head = kv_group % int(p.kv_heads);
  const int heads = int(p.heads / p.kv_heads);
  const int row_tiles = int(ceil_div(p.query_length, C::kRows));
  return {batch,
          kv_head,
          tile,
          global_load(row_ranges + 2 * tile),
          global_load(row_ranges + 2 * tile + 1),
          kv_head * heads,
          (kv_head + 1) * heads,
          backward_band(p, backward_keys(p, tile, C::kKeys), C::kRows),
          row_tiles,
          int(key_tiles),
          batch * p.heads * row_tiles,
          {0, 0}};
}

// Draws the next task, in one thread. With packed sequences it also makes the problem of the sequence from a copy of p.
template <class C>
SCALEDOT_DEVICE Sm90BackwardTask draw_backward_task(const Problem& p, const Sm90BackwardPlan& plan,
                                                    Sm90BackwardShared<C>& shared) {
  const int64_t index = atomic_add(plan.ticket, 1);
  if constexpr (C::kPacked) {
    if (index >= p.kv_heads * global_load(plan.key_starts + p.batch)) {
      Sm90BackwardTask none = {};
      none.tile = -1;
      return none;
    }
    const int b = sequence_of_tile(plan.key_starts, p.batch, int(index / p.kv_heads));
    const Sm90SequenceTiles tiles = tiles_of_sequence(plan, b);
    narrow_to_tiles<C>(p, tiles, shared.packed.problem);
    Sm90BackwardTask task =
        sm90_backward_task<C>(shared.packed.problem, plan.row_ranges + 2 * int64_t(tiles.first_key_tile),
                              tiles.key_tiles, index - p.kv_heads * tiles.first_key_tile);
    task.first_number = p.heads * tiles.first_row_tile;
    task.first = {int(query_rows(p, b).first), int(key_rows(p, b).first)};
    return task;
  } else {
    return sm90_backward_task<C>(p, plan.row_ranges, plan.key_tiles, index);
  }
}

// The problem of the block's task.
template <class C>
SCALEDOT_DEVICE const Problem& problem_of_task(const Problem& p, const Sm90BackwardShared<C>& shared) {
  if constexpr (C::kPacked)
    return shared.packed.problem;
  else
    return p;
}

// One step of a task: a row tile of one query head.
struct Sm90BackwardStep {
  int head, row_tile;
  uint32_t number;  // of the block's steps, from 0; the position in the rings of stages
};

// The steps of a task, in the same order in all warps. The task stays in shared memory to save registers.
SCALEDOT_DEVICE bool has_steps(const Sm90BackwardTask& task) {
  return shared_load(&task.first_row_tile) < shared_load(&task.end_row_tile);
}
SCALEDOT_DEVICE Sm90BackwardStep first_step(const Sm90BackwardTask& task) {
  return {shared_load(&task.first_head), shared_load(&task.first_row_tile), 0};
}
// Goes on to the next step. Returns whether there is one.
SCALEDOT_DEVICE bool next_step(const Sm90BackwardTask& task, Sm90BackwardStep& step) {
  ++step.number;
  if (++step.row_tile == shared_load(&task.end_row_tile))
    ++step.head, step.row_tile = shared_load(&task.first_row_tile);
  return step.head < shared_load(&task.end_head);
}

// Calls body(step) for each step.
template <class Body>
SCALEDOT_DEVICE void for_each_step(const Sm90BackwardTask& task, const Body& body) {
  if (!has_steps(task)) return;
  Sm90BackwardStep step = first_step(task);
#pragma unroll 1
  do body(step);
  while (next_step(task, step));
}
SCALEDOT_DEVICE bool is_last(const Sm90BackwardTask& task, const Sm90BackwardStep& step) {
  return step.head + 1 == shared_load(&task.end_head) && step.row_tile + 1 == shared_load(&task.end_row_tile);
}

// The number of a row tile among those of all (batch, head) pairs.
SCALEDOT_DEVICE int64_t tile_number(const Sm90BackwardTask& task, const Sm90BackwardStep& step) {
  return shared_load(&task.first_number) + int64_t(step.head) * shared_load(&task.row_tiles) + step.row_tile;
}

template <class C>
SCALEDOT_DEVICE void init_backward_barriers(Sm90BackwardShared<C>& shared) {
  constexpr int kWarps = C::kConsumers * kWarpgroupThreads / kWarpSize;
  mbarrier_init(&shared.loaded, 1);
  const auto init_ring = [&](uint64_t* full, uint64_t* empty, int stages) {
    for (int stage = 0; stage < stages; ++stage) {
      mbarrier_init(full + stage, 1);
      mbarrier_init(empty + stage, kWarps);
    }
  };
  init_ring(shared.query_full, shared.query_empty, C::kQueryStages);
  init_ring(shared.grad_full, shared.grad_empty, C::kGradStages);
  mbarrier_init_fence();
}

}  // namespace
}  // namespace scaledot
