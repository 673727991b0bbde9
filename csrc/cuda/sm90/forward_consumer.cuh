// A consumer of the forward: one warpgroup, from queries, keys and values to the output of 64 rows.
#pragma once

#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/forward_nonfinite.cuh"
#include "cuda/sm90/forward_plan.cuh"
#include "cuda/sm90/forward_store.cuh"

namespace scaledot {
namespace {

// Issues S = Q K^T.
template <class C>
SCALEDOT_DEVICE void issue_scores(const SwizzledTile<kWgmmaRows, C::kDim>& query,
                                  const SwizzledTile<C::kKeys, C::kDim>& key, float (&s)[C::kKeys / 2]) {
  const uint64_t a = k_major_descriptor(query.data), b = k_major_descriptor(key.data);
#pragma unroll
  for (int k = 0; k < C::kDim / 16; ++k) {
    const int panel = k * 16 / kPanelCols, within = k * 16 % kPanelCols * 2;
    wgmma<C::kKeys, Major::k, Major::k>(s, advance_descriptor(a, panel * query.kPanelBytes + within),
                                        advance_descriptor(b, panel * key.kPanelBytes + within), k > 0,
                                        Type<typename C::Storage>{});
  }
}
// Issues O += P V.
template <class C>
SCALEDOT_DEVICE void issue_output(const uint32_t (&weights)[C::kKeys / 16][4],
                                  const SwizzledTile<C::kKeys, C::kValueDim>& value, float (&out)[C::kValueDim / 2]) {
  const uint64_t b = mn_major_descriptor(value.data, value.kPanelBytes);
#pragma unroll
  for (int k = 0; k < C::kKeys / 16; ++k)
    wgmma<C::kValueDim, Major::mn>(out, weights[k], advance_descriptor(b, k * 16 * kPanelCols * 2), true,
                                   Type<typename C::Storage>{});
}

// A consumer's position in the pipelines, and the barriers that it shares with the producer and the other consumer.
template <class C>
struct Sm90ForwardPipeline {
  Sm90ForwardShared<C>& shared;
  int number;  // of the warpgroup among the consumers; not in a general kernel
  // Two counters in one register: bits 0 and 1 are the query tiles taken, modulo 4; the rest are the key tiles taken.
  uint32_t taken;
  static_assert(kTileSlots == 2);

  SCALEDOT_MEMBER Ring<C::kStages> keys() const { return {taken >> 2}; }
  SCALEDOT_MEMBER Ring<C::kStages> values() const { return {(taken >> 2) - 1}; }  // one tile after the keys
  SCALEDOT_MEMBER void next_keys() { taken += 4; }
  // A general kernel has no register for it and computes it again.
  SCALEDOT_MEMBER int consumer() const {
    return C::kGeneral ? opt_barrier(thread_index() / kWarpgroupThreads) - 1 : number;
  }

  SCALEDOT_MEMBER void wait_for_keys() const { mbarrier_wait(&shared.key_full[keys().stage()], keys().phase()); }
  SCALEDOT_MEMBER void wait_for_values() const {
    mbarrier_wait(&shared.value_full[values().stage()], values().phase());
  }
  // One arrival a warp, which no longer reads the stage. In a cluster it arrives at every block, because each of them
  // fills a part of the stage.
  SCALEDOT_MEMBER static void release_stage(uint64_t& empty) {
    const int lane = opt_barrier(lane_index());
    if constexpr (C::kCluster > 1) {
      if (lane < C::kCluster) mbarrier_arrive_at(&empty, lane);
    } else {
      if (lane == 0) mbarrier_arrive(&empty);
    }
  }
  SCALEDOT_MEMBER void release_keys() const { release_stage(shared.key_empty[keys().stage()]); }
  SCALEDOT_MEMBER void release_values() const { release_stage(shared.value_empty[values().stage()]); }

  // Around the products of a step, which one consumer issues at a time.
  SCALEDOT_MEMBER void ping_pong_wait() const {
    if constexpr (C::kPingPong) named_barrier_wait(kPingPongBarrier + consumer(), 256);
  }
  SCALEDOT_MEMBER void ping_pong_arrive() const {
    if constexpr (C::kPingPong) named_barrier_arrive(kPingPongBarrier + (consumer() + 1) % C::kConsumers, 256);
  }

  // Once the copies of the last output have read their stage, it may be filled. Called after the next tile has begun,
  // so that no warp waits for the copies.
  SCALEDOT_MEMBER void release_output() const {
    if (opt_barrier(thread_index()) % kWarpgroupThreads != 0) return;
    bulk_wait_read<0>();
    if constexpr (C::kCluster > 1 && C::kQueryStages == 1) {
#pragma unroll
      for (int block = 0; block < C::kCluster; ++block) mbarrier_arrive_at(&shared.output_empty, block);
    } else {
      mbarrier_arrive(&shared.output_empty);
    }
  }

  // With one stage of queries, the next ones are loaded after the last scores. So the output leaves through the last
  // tile of keys (consumer 0) and of values (consumer 1), which the other consumer has finished with by then.
  SCALEDOT_MEMBER void release_queries() const {
    if constexpr (C::kQueryStages == 1) {
      if (opt_barrier(lane_index()) == 0) mbarrier_arrive(&shared.query_empty);
      if (consumer() == 1) named_barrier_arrive(kOutputBarrier, 2 * kWarpgroupThreads);
    }
  }
  // wgmma_wait is of one warp. Operands are overwritten when all warps are done with them.
  SCALEDOT_MEMBER Sm90OutputTile<C>& wait_for_output_tile(SwizzledTile<kWgmmaRows, C::kDim>& query) const {
    if constexpr (C::kQueryStages == 1) {
      named_barrier_wait(kOutputBarrier + consumer(), 2 * kWarpgroupThreads);
      if (consumer() == 0) named_barrier_arrive(kOutputBarrier + 1, 2 * kWarpgroupThreads);
    } else {
      named_barrier_wait(kConsumerBarrier + consumer(), kWarpgroupThreads);
    }
    const int last = values().stage();
    return *reinterpret_cast<Sm90OutputTile<C>*>(C::kQueryStages > 1 ? query.data
                                                 : consumer() == 0   ? shared.key[last].data
                                                                     : shared.value[last].data);
  }

  // The slot of the query tile that was taken last. Its content is looked up again for each use: in a register it
  // would stay there through the loop over keys.
  SCALEDOT_MEMBER int slot() const { return opt_barrier(Ring<kTileSlots>{(taken - 1) & 3}.stage()); }
  SCALEDOT_MEMBER void release_slot() const {
    warp_barrier();
    if (opt_barrier(lane_index()) == 0) mbarrier_arrive(&shared.tile_empty[slot()]);
  }

  // Waits for the next query tile. Returns its number, or -1 if there is none. `queries`: its queries' ring position.
  // The slot of a packed problem stays in use until release_slot().
  SCALEDOT_MEMBER int next_tile(Ring<C::kQueryStages>& queries) {
    const Ring<kTileSlots> slots = {taken & 3};
    queries = {taken & 3};
    taken = (taken & ~3u) | ((taken + 1) & 3);
    mbarrier_wait(&shared.tile_full[slots.stage()], slots.phase());
    const int tile = warp_uniform(shared_load(&shared.tile[slots.stage()]));
    if constexpr (!C::kPacked) release_slot();
    return tile;
  }
};

// A consumer's work on one query tile: its 64 rows, their softmax so far, and accumulators. All of them are local
// variables of consume_forward. As members, arrays would keep the compiler from promoting the whole struct to registers
// early.
template <class C>
struct Sm90ForwardRows {
  const Problem& given;
  const Sm90ForwardPlan& plan;
  Sm90ForwardPipeline<C>& pipeline;
  const Sm90ForwardTask& task;
  const Sm90ThreadRows<C>& rows;
  const SwizzledTile<kWgmmaRows, C::kDim>& query;
  OnlineSoftmax<C>& online;
  float (&s)[C::kKeys / 2];
  float (&out)[C::kValueDim / 2];
  uint32_t (&weights)[C::kKeys / 16][4];
  float (&rescale)[2];

  SCALEDOT_MEMBER const Problem& problem() const { return problem_of_slot<C>(given, pipeline.slot(), pipeline.shared); }

  // Replaces the products in s with weights.
  SCALEDOT_MEMBER void apply_softmax(int t) {
    const Problem& p = problem();
    const int first_key = t * C::kKeys;
    if constexpr (C::kQuantised) {
      const float scale = pipeline.shared.packed.slots[pipeline.slot()].key_scale;
#pragma unroll
      for (int e = 0; e < C::kKeys / 2; ++e) s[e] *= scale;
    }
    finish_scores<C>(p, plan.scalars, rows, first_key, has_masked(task.keys, rows, first_key), s);
    exponentiate<C>(online, plan.scalars.exponent, s, rescale);
    if constexpr (C::kGeneral)
      if (p.dropout_p > 0) apply_dropout<C>(p, rows, first_key, s);
  }

  // Whether key tile t has masked scores (a general kernel: may have some) and non-finite values. The tensor cores
  // multiply such a tile like any other, so that control flow never depends on the values. Their sums are then
  // discarded, and the product is computed again without the masked terms.
  SCALEDOT_MEMBER bool needs_repair(int t) const {
    if constexpr (C::kCluster > 1) return false;  // nothing is masked
    // The barrier keeps the first key out of the registers of the loop.
    if (!plan.repairs || (!C::kGeneral && !tile_has_masked(task.keys, opt_barrier(t * C::kKeys), C::kKeys)))
      return false;
    pipeline.wait_for_values();
    return !is_finite<typename C::Storage>(pipeline.shared.value[pipeline.values().stage()]);
  }
  // `backup` is volatile so that it stays in memory and takes no registers.
  SCALEDOT_MEMBER void back_up_output(bool repair, volatile float (&backup)[C::kValueDim / 2]) const {
    if (!repair) return;
#pragma unroll
    for (int e = 0; e < C::kValueDim / 2; ++e) backup[e] = out[e];
  }
  // Completes O += P V for key tile t.
  SCALEDOT_MEMBER void finish_output(int t, bool repair, const volatile float (&backup)[C::kValueDim / 2]) {
    wgmma_wait<0>();
    fence_operand(out);
    if (repair) {
#pragma unroll
      for (int e = 0; e < C::kValueDim / 2; ++e) out[e] = backup[e];
      multiply_unmasked<C>(problem(), rows, t * C::kKeys, weights, pipeline.shared.value[pipeline.values().stage()],
                           out);
      fence_async();  // the copy engine overwrites what was read
      warp_barrier();
    }
    pipeline.release_values();
  }

  // The first key tile: S = Q K_0^T, softmax.
  SCALEDOT_MEMBER void first_step() {
    pipeline.wait_for_keys();
    wgmma_fence();
    issue_scores<C>(query, pipeline.shared.key[pipeline.keys().stage()], s);
    wgmma_commit();
    pipeline.release_output();
    wgmma_wait<0>();
    fence_operand(s);
    pipeline.release_keys();
    pipeline.next_keys();
    apply_softmax(task.keys.begin);
    narrow_weights<C>(s, weights);
  }

  // Key tile t: S = Q K_t^T and O += P V_(t-1) on the tensor cores; softmax of S while O is still being computed.
  SCALEDOT_MEMBER void step(int t, volatile float (&backup)[C::kValueDim / 2]) {
    const bool repair = needs_repair(t - 1);
    back_up_output(repair, backup);
    pipeline.wait_for_keys();
    pipeline.ping_pong_wait();
    fence_operand(weights);
    fence_operand(out);
    wgmma_fence();
    issue_scores<C>(query, pipeline.shared.key[pipeline.keys().stage()], s);
    wgmma_commit();
    pipeline.wait_for_values();
    wgmma_fence();
    issue_output<C>(weights, pipeline.shared.value[pipeline.values().stage()], out);
    wgmma_commit();
    pipeline.ping_pong_arrive();
    wgmma_wait<1>();
    fence_operand(s);
    pipeline.release_keys();
    apply_softmax(t);
    finish_output(t - 1, repair, backup);
    pipeline.next_keys();
#pragma unroll
    for (int e = 0; e < C::kValueDim / 2; ++e) out[e] *= rescale[e / 2 % 2];
    narrow_weights<C>(s, weights);
  }

  // O += P V of the last key tile.
  SCALEDOT_MEMBER void last_output(volatile float (&backup)[C::kValueDim / 2]) {
    const bool repair = needs_repair(task.keys.end - 1);
    back_up_output(repair, backup);
    pipeline.wait_for_values();
    fence_operand(weights);
    fence_operand(out);
    wgmma_fence();
    issue_output<C>(weights, pipeline.shared.value[pipeline.values().stage()], out);
    wgmma_commit();
    finish_output(task.keys.end - 1, repair, backup);
  }
};

template <class C>
SCALEDOT_DEVICE void consume_forward(const Problem& given, const Sm90ForwardPlan& plan, Sm90ForwardShared<C>& shared) {
  Sm90ForwardPipeline<C> pipeline = {shared, C::kGeneral ? 0 : warpgroup_index() - 1, 0};
  if (pipeline.consumer() == C::kConsumers - 1) pipeline.ping_pong_arrive();  // the first consumer begins

  for (;;) {
    Ring<C::kQueryStages> queries;
    const int tile = pipeline.next_tile(queries);
    if (tile < 0) break;
    const Problem& before = problem_of_slot<C>(given, pipeline.slot(), shared);
    const Sm90ForwardTask task = task_of_slot<C>(before, plan, tile, pipeline.slot(), shared);
    const Sm90ThreadRows<C> rows =
        sm90_thread_rows<C>(before, task.batch_head, task.first_row + pipeline.consumer() * kWgmmaRows);
    auto& query = shared.query[queries.stage()][pipeline.consumer()];
    OnlineSoftmax<C> online = empty_softmax<C>();
    float s[C::kKeys / 2], out[C::kValueDim / 2];
    uint32_t weights[C::kKeys / 16][4];
    float rescale[2];
#pragma unroll
    for (int e = 0; e < C::kValueDim / 2; ++e) out[e] = 0;
    volatile float backup[C::kValueDim / 2];
    Sm90ForwardRows<C> state = {given, plan, pipeline, task, rows, query, online, s, out, weights, rescale};

    mbarrier_wait(&shared.query_full[queries.stage()], queries.phase());
    if (task.keys.begin < task.keys.end) {
      state.first_step();
#pragma unroll 1
      for (int t = task.keys.begin + 1; t < task.keys.end; ++t) state.step(t, backup);
      pipeline.release_queries();
      state.last_output(backup);
    } else {
      pipeline.release_output();
      pipeline.release_queries();
    }
    if (C::kCluster == 1 && plan.nan.count && !plan.repairs && has_nan<C>(out))
      note_tile(plan.nan, tile_of_slot<C>(plan, rows, pipeline.slot(), shared));
    auto& buffer = pipeline.wait_for_output_tile(query);
    const Problem& p = state.problem();
    store_rows<C>(p, plan, rows, online, value_scale_of_slot<C>(pipeline.slot(), shared), buffer, out);
    fence_async();
    named_barrier_wait(kConsumerBarrier + pipeline.consumer(), kWarpgroupThreads);
    const int first_row = task.first_row + pipeline.consumer() * kWgmmaRows;
    if (C::kPacked && first_row < p.query_length && first_row + kWgmmaRows > p.query_length) {
      store_last_rows<C>(p, task.batch_head, first_row, buffer);
      fence_async();  // the copy engine overwrites what was read
      named_barrier_wait(kConsumerBarrier + pipeline.consumer(), kWarpgroupThreads);
    } else {
      const int first_of_all = first_query_of_slot<C>(pipeline.slot(), shared);
      store_output_tile<C>(p, plan, task.batch_head, rows.first, first_of_all, buffer);
    }
    if constexpr (C::kPacked) pipeline.release_slot();
  }
  if (opt_barrier(thread_index()) % kWarpgroupThreads == 0) bulk_wait_read<0>();  // copies read this shared memory
}

}  // namespace
}  // namespace scaledot
