// The backward on sm_90's tensor cores and copy engine; formulas as in generic/backward.cuh.
//
//   for a tile of keys, by two warpgroups with 64 keys each:
//     for each tile of rows, of each query head that shares the keys:
//       S^T = K Q^T      dP^T = V dO^T      Pd, dX (backward_scores.cuh)
//       dV += Pd^T dO    dK += dX^T Q       with Pd^T and dX^T in registers
//       dQ of these rows += dX K            dX through shared memory; added up in global memory, in the order of the keys
// as Shah et al., "FlashAttention-3", 2024, have it.
//
// The third warpgroup's first warp loads, its second adds to dQ: when all earlier tiles of keys have (ptx/turn.h), so that results have
// the same bits every time. Blocks take their tile of keys when they begin, in order: the earliest one that still runs never waits.
//
// A masked weight is 0 here, which would not hide NaN or inf: where scores are masked and query, key or grad_output have any, this kernel
// leaves everything to the generic ones (backward_rows.cuh).
#pragma once

#include "cuda/ptx/tensor_map.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90/backward_scores.cuh"

namespace scaledot {
namespace {

// A tensor as the copy engine sees it. Broadcast dimensions have one element there: their step is 0.
struct Source {
  TensorMap map;
  int head_step, batch_step;
};
struct Sources {
  Source query, key, value, grad_output;
};

enum : int {
  kAllConsumers = 1,
  kSumsReady = 2,
  kSumsTaken = 4,
  kOneConsumer = 6
};  // barriers; + warpgroup, but the first

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
          backward_band(p, backward_keys(p, tile))};
}

// One of its tiles of rows.
struct BackwardStep {
  int head, row_tile;
  int stage, phase;  // where it lies, and for which time
  bool first;
};

// Calls body(step) for each, in the same order in all warps. The task stays in shared memory: it would take registers.
template <class Body>
SCALEDOT_DEVICE void for_each_step(const BackwardTask& task, int stages, const Body& body) {
  BackwardStep step = {shared_load(&task.first_head), shared_load(&task.first_row_tile), 0, 0, true};
  if (step.row_tile >= shared_load(&task.end_row_tile)) return;
#pragma unroll 1
  do {
    body(step);
    step.first = false;
    if (++step.stage == stages) step.stage = 0, step.phase ^= 1;
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
SCALEDOT_DEVICE void load_panels(typename C::Storage* to, const Source& from, int rows, uint64_t* mbarrier, int row,
                                 int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < C::kPanels; ++panel)
    tensor_load(to + panel * rows * C::kPanelCols, from.map, mbarrier, panel * C::kPanelCols, row,
                head * from.head_step, batch * from.batch_step);
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
  for_each_step(task, C::kStages, [&](const BackwardStep& step) {
    uint64_t* full = &shared.full[step.stage];
    const int row = step.row_tile * C::kRows;
    const int64_t padded = tile_number(p, plan, task, step) * C::kRows;
    mbarrier_wait(&shared.empty[step.stage], step.phase ^ 1);
    mbarrier_arrive_expect(full, 2 * kRowBytes + kTermBytes + kPositionBytes);
    load_panels<C>(shared.query[step.stage], from.query, C::kRows, full, row, step.head, batch);
    bulk_load(shared.terms[step.stage], plan.terms + padded, kTermBytes, full);
    if constexpr (C::kGeneral) bulk_load(shared.positions[step.stage], plan.positions + padded, kPositionBytes, full);
    load_panels<C>(shared.grad_output[step.stage], from.grad_output, C::kRows, full, row, step.head, batch);
  });
}

// One warp: adds what the consumers leave in shared memory to grad_query, when it is this block's turn.
template <class C>
SCALEDOT_DEVICE void add_grad_query(const Problem& p, const BackwardPlan90& plan, const BackwardTask& task,
                                    BackwardShared90<C>& shared) {
  constexpr int kShareSums = C::kRows * C::kShare;
  for_each_step(task, C::kStages, [&](const BackwardStep& step) {
    const int64_t tile = tile_number(p, plan, task, step);
    if (lane_index() == 0) turn_wait(plan.turns + tile, shared_load(&task.tile));
    warp_barrier();
#pragma unroll 1
    for (int group = 0; group < C::kConsumers; ++group) {
      named_barrier_wait(kSumsReady + group, kWarpgroupThreads + kWarpSize);
      if (lane_index() == 0) {
        bulk_reduce_add(plan.grad_query + (tile * C::kConsumers + group) * kShareSums, shared.grad_query[group],
                        kShareSums * int(sizeof(float)));
        bulk_commit();
        bulk_wait_read<0>();
      }
      warp_barrier();
      if (!is_last(task, step)) named_barrier_arrive(kSumsTaken + group, kWarpgroupThreads + kWarpSize);
    }
    if (lane_index() == 0) {
      bulk_wait<0>();
      turn_end(plan.turns + tile);
    }
    warp_barrier();
  });
}

// d = A B^T, for 64 rows of A and kRows rows of B in panels.
template <class C>
SCALEDOT_DEVICE void multiply_panels(float (&d)[kScores], const typename C::Storage* a, int a_rows,
                                     const typename C::Storage* b) {
  const uint64_t of_a = operand_k(a), of_b = operand_k(b);
#pragma unroll
  for (int panel = 0; panel < C::kPanels; ++panel)
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma<C::kRows, Major::k, Major::k>(d, operand_at(of_a, panel * a_rows * 128 + 32 * k),
                                          operand_at(of_b, panel * C::kRows * 128 + 32 * k), panel + k > 0,
                                          Type<typename C::Storage>{});
}

// d += A B, A in registers: 64 keys x kRows rows; B: kRows rows in panels.
template <class C>
SCALEDOT_DEVICE void multiply_registers(float (&d)[C::kDim / 2], const uint32_t (&a)[4][4],
                                        const typename C::Storage* b) {
  const uint64_t of_b = operand_mn(b, C::kRows * 128);
#pragma unroll
  for (int k = 0; k < 4; ++k)
    wgmma<C::kDim, Major::mn>(d, a[k], operand_at(of_b, k * 16 * 128), true, Type<typename C::Storage>{});
}

template <class C>
struct Consumer {
  using Storage = typename C::Storage;
  const Problem& p;
  const BackwardPlan90& plan;
  BackwardShared90<C>& shared;
  int group, first_key;  // the warpgroup, and its first key in the tile
  float grad_key[C::kDim / 2], grad_value[C::kDim / 2];

  // One tile of rows. kMasked: some of its scores are masked.
  template <bool kMasked>
  SCALEDOT_MEMBER void tile(const BackwardStep& step, const Band& band) {
    const KeyLane lane = key_lane();
    const Storage* query = shared.query[step.stage];
    const Storage* grad_output = shared.grad_output[step.stage];
    const RowTerms* terms = shared.terms[step.stage];
    Storage* scores = shared.scores[step.stage];  // what lay there was used before the last barrier of all consumers
    const uint8_t* kept = nullptr;
    if constexpr (C::kGeneral) {
      if (p.dropout_p > 0) {
        kept = shared.kept[group];
        draw_dropout(p, shared.kept[group], shared_load(&shared.task.batch), step.head, step.row_tile * C::kRows,
                     shared_load(&shared.task.tile) * int64_t(C::kKeys) + first_key);
        named_barrier_wait(kOneConsumer + group, kWarpgroupThreads);
      }
    }
    float s[kScores], dp[kScores];
    uint32_t weights[4][4], gradients[4][4];
    mbarrier_wait(&shared.full[step.stage], step.phase);
    wgmma_fence();
    multiply_panels<C>(s, shared.key + first_key * C::kPanelCols, C::kKeys, query);
    wgmma_commit();
    wgmma_fence();
    multiply_panels<C>(dp, shared.value + first_key * C::kPanelCols, C::kKeys, grad_output);
    wgmma_commit();

    uint32_t masked = 0;
    if constexpr (C::kGeneral) {
      wgmma_wait<0>();
      wgmma_hold(s);
      wgmma_hold(dp);
      general_scores<C>(p, general_terms(p, kMasked), s, dp, terms, shared.positions[step.stage], kept, band.rows,
                        backward_keys(p, shared_load(&shared.task.tile)), first_key, lane);
    } else {
      // dP arrives while P is computed, and dV while dS is.
      wgmma_wait<1>();
      wgmma_hold(s);
      if (kMasked) masked = outside_band(band, lane, first_key);
      weights_of_products<kMasked>(s, terms, float(p.scale) * kLog2E, lane, masked);
    }

    // dV += Pd^T dO
    narrow_scores<Storage>(s, weights);
    wgmma_fence();
    multiply_registers<C>(grad_value, weights, grad_output);
    wgmma_commit();
    if constexpr (!C::kGeneral) {
      wgmma_wait<1>();
      wgmma_hold(dp);
      gradients_of_products<kMasked>(s, dp, terms, lane, masked);
    }

    // dK += dX^T Q
    narrow_scores<Storage>(dp, gradients);
    store_scores(scores + first_key * C::kRows, gradients, lane);
    fence_async();
    named_barrier_wait(kAllConsumers, C::kConsumers * kWarpgroupThreads);
    wgmma_fence();
    multiply_registers<C>(grad_key, gradients, query);
    wgmma_commit();

    // dQ of these rows += dX K
    if (plan.grad_query) {
      constexpr int kColumnBytes = C::kShare * 2;  // of a panel's rows of 128
      const int first_byte = group * kColumnBytes;
      const char* columns = reinterpret_cast<const char*>(shared.key) + first_byte / 128 * C::kKeys * 128;
      const uint64_t a = operand_mn(scores, C::kKeys * 128);
      const uint64_t b = operand_mn(columns + first_byte % 128, C::kKeys * 128);
      float sums[C::kShare / 2];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < C::kKeys / 16; ++k)
        wgmma<C::kShare, Major::mn, Major::mn>(sums, operand_at(a, k * 16 * 128), operand_at(b, k * 16 * 128), k > 0,
                                               Type<Storage>{});
      wgmma_commit();
      wgmma_wait<1>();
      release(step, weights, gradients);
      wgmma_wait<0>();
      wgmma_hold(sums);
      if (!step.first) named_barrier_wait(kSumsTaken + group, kWarpgroupThreads + kWarpSize);
      using Four = Few<float, 4>;
      Four* to = reinterpret_cast<Four*>(shared.grad_query[group]) + thread_index() % kWarpgroupThreads;
#pragma unroll
      for (int n = 0; n < C::kShare / 8; ++n)
        shared_store(to + n * kWarpgroupThreads,
                     Four{{sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3]}});
      fence_async();
      named_barrier_arrive(kSumsReady + group, kWarpgroupThreads + kWarpSize);
    } else {
      wgmma_wait<0>();
      release(step, weights, gradients);
    }
  }

  // The products that read the tile of rows are done.
  SCALEDOT_MEMBER void release(const BackwardStep& step, uint32_t (&weights)[4][4], uint32_t (&gradients)[4][4]) {
    wgmma_hold(weights);
    wgmma_hold(gradients);
    wgmma_hold(grad_value);
    wgmma_hold(grad_key);
    warp_barrier();
    if (lane_index() == 0) mbarrier_arrive(&shared.empty[step.stage]);
  }

  SCALEDOT_MEMBER void run() {
#pragma unroll
    for (int k = 0; k < C::kDim / 2; ++k) grad_key[k] = grad_value[k] = 0;
    mbarrier_wait(&shared.loaded, 0);
    for_each_step(shared.task, C::kStages, [&](const BackwardStep& step) {
      const int row = step.row_tile * C::kRows;
      const Band band = band_of_rows(shared_load(&shared.task.band), row, smaller(int(p.query_length) - row, C::kRows));
      bool masks = !band_is_whole(band);
      if constexpr (C::kGeneral) masks |= !positions_are_a_band(p) || p.attn_mask.data;
      if (masks)
        tile<true>(step, band);
      else
        tile<false>(step, band);
    });
  }

  SCALEDOT_MEMBER void store(const TensorView& view, const BackwardTask& task, int64_t cols, float factor,
                             const float (&sums)[C::kDim / 2]) const {
    if (!view.data) return;
    const KeyLane lane = key_lane();
    const Range keys = backward_keys(p, task.tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t key = keys.begin + first_key + lane.key(half);
      if (key >= keys.end) continue;
      Storage* to = at<Storage>(p, view, task.batch, task.kv_head) + key * view.row_stride;
#pragma unroll
      for (int n = 0; n < C::kDim / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int col = 8 * n + 2 * lane.quad + j;
          if (col >= cols) continue;
          Storage x;
          narrow(sums[4 * n + 2 * half + j] * factor, x);
          global_store(to + col * view.col_stride, x);
        }
    }
  }
};

template <class C>
SCALEDOT_KERNEL(C::kThreads)
backward_kernel90(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM BackwardPlan90 plan, SCALEDOT_PARAM Sources from) {
#if SCALEDOT_SM90
  auto& shared = *static_cast<BackwardShared90<C>*>(shared_memory());
  if (thread_index() == 0) {
    constexpr int kWarps = C::kConsumers * kWarpgroupThreads / kWarpSize;
    mbarrier_init(&shared.loaded, 1);
    for (int stage = 0; stage < C::kStages; ++stage) {
      mbarrier_init(&shared.full[stage], 1);
      mbarrier_init(&shared.empty[stage], kWarps);
    }
    mbarrier_init_fence();
    const int64_t index = atomic_add(plan.ticket, 1);
    const int* rows = plan.row_ranges + 2 * (index % plan.key_tiles);
    shared_store(&shared.task, backward_task(p, plan.key_tiles, index, global_load(rows), global_load(rows + 1)));
  }
  barrier();
  if (is_wild(plan)) return;
  const int group = warpgroup_index();
  if (group == C::kConsumers) {
    give_registers<C::kProducerRegisters>();
    const int warp = warp_uniform(warp_index()) % 4;
    if (warp == 0 && lane_index() == 0) load_tiles<C>(p, plan, from, shared.task, shared);
    if (warp == 1 && plan.grad_query) add_grad_query<C>(p, plan, shared.task, shared);
  } else {
    take_registers<C::kConsumerRegisters>();
    Consumer<C> consumer = {p, plan, shared, group, 64 * group, {}, {}};
    consumer.run();
    const BackwardTask task = shared_load(&shared.task);
    consumer.store(p.grad_key, task, p.head_dim, float(p.scale), consumer.grad_key);
    consumer.store(p.grad_value, task, p.value_dim, 1, consumer.grad_value);
  }
#endif
}

}  // namespace
}  // namespace scaledot
