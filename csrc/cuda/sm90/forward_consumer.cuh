// The consumers of the forward: a warpgroup each, from queries, keys and values to the output of 64 rows.
#pragma once

#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/finite.cuh"
#include "cuda/sm90/forward_work.cuh"

namespace scaledot {
namespace {
// S = Q K^T, started.
template <class C>
SCALEDOT_DEVICE void start_scores(const Panels<kConsumerRows, C::kDim>& query, const Panels<C::kKeys, C::kDim>& key,
                                  float (&s)[C::kKeys / 2]) {
  const uint64_t a = operand_k(query.data), b = operand_k(key.data);
#pragma unroll
  for (int k = 0; k < C::kDim / 16; ++k) {
    const int panel = k * 16 / kPanelCols, within = k * 16 % kPanelCols * 2;
    wgmma<C::kKeys, Major::k, Major::k>(s, operand_at(a, panel * query.kPanelBytes + within),
                                        operand_at(b, panel * key.kPanelBytes + within), k > 0,
                                        Type<typename C::Number>{});
  }
}
// O += P V, started.
template <class C>
SCALEDOT_DEVICE void start_output(const uint32_t (&weights)[C::kKeys / 16][4], const Panels<C::kKeys, C::kDim>& value,
                                  float (&out)[C::kDim / 2]) {
  const uint64_t b = operand_mn(value.data, value.kPanelBytes);
#pragma unroll
  for (int k = 0; k < C::kKeys / 16; ++k)
    wgmma<C::kDim, Major::mn>(out, weights[k], operand_at(b, k * 16 * kPanelCols * 2), true,
                              Type<typename C::Number>{});
}

// Rows that are there: the output by way of shared memory, where the queries were, then lse.
template <class C>
SCALEDOT_DEVICE void store_rows(const Problem& p, const Sm90ForwardPlan& plan, const ThreadRows<C>& rows,
                                const OnlineRows<C>& online, Panels<kConsumerRows, C::kDim>& panels,
                                float (&out)[C::kDim / 2]) {
  const Place place = place_of_thread();
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const RowState<float> state = whole_row(plan.scalars, online, half);
    factor[half] = normaliser(state) * plan.scalars.kept;
    const int i = rows.first + 8 * half, plane = rows.plane;
    if (i >= p.query_length || place.col != 0) continue;
    if (p.lse.data)
      global_store(at<float>(p, p.lse, plane / int(p.heads), plane % int(p.heads)) + i * p.lse.row_stride,
                   logsumexp(state));
    if (plan.states) global_store(plan.states + plane * p.query_length + i, state);
  }
  // Lane l names row l % 8 of the 8 x 8 matrix l / 8; of 16 rows and 16 columns matrices are taken down first.
  const int thread = recomputed(thread_index() % kWarpgroupThreads), lane = thread % kWarpSize;
  const int row = thread / kWarpSize * 16 + lane % 16;
  char* data = reinterpret_cast<char*>(panels.data) + row * kSwizzleCols * 2;
  const int exchanged = swizzled_byte(row % 8, lane / 16 * 16) - row % 8 * kSwizzleCols * 2;
#pragma unroll
  for (int n = 0; n < C::kDim / 8; n += 2) {
    uint32_t r[4];
#pragma unroll
    for (int m = 0; m < 4; ++m)
      r[m] = narrow_pair(out[4 * n + 2 * m] * factor[m % 2], out[4 * n + 2 * m + 1] * factor[m % 2],
                         Type<typename C::Number>{});
    stmatrix_x4(data + n / 8 * panels.kPanelBytes + (exchanged ^ (n % 8 * 16)), r);
  }
}

template <class C>
SCALEDOT_DEVICE void consume(const Problem& p, const Sm90ForwardPlan& plan, Sm90ForwardShared<C>& shared) {
  // How many tiles of rows, modulo 4, and from bit 2 on how many of keys were taken: a register less. Values are one tile behind.
  static_assert(kTileSlots == 2);
  uint32_t taken = 0;
  const auto keys = [&] { return Ring<kStages>{taken >> 2}; };
  const auto values = [&] { return Ring<kStages>{(taken >> 2) - 1}; };
  const auto consumer = [] { return recomputed(thread_index() / kWarpgroupThreads) - 1; };
  const auto arrive = [](uint64_t& b) {  // one arrival a warp
    if (recomputed(lane_index()) == 0) mbarrier_arrive(&b);
  };
  const auto take_turn = [&] {
    if constexpr (C::kTakesTurns) named_barrier_wait(kTurn + consumer(), 256);
  };
  const auto end_turn = [&] {
    if constexpr (C::kTakesTurns) named_barrier_arrive(kTurn + (consumer() + 1) % C::kConsumers, 256);
  };
  if (consumer() == C::kConsumers - 1) end_turn();  // the first one's turn is first

  for (;;) {
    const Ring<kTileSlots> slots = {taken & 3};
    const Ring<1> queries = {taken & 3};
    taken = (taken & ~3u) | ((taken + 1) & 3);
    mbarrier_wait(&shared.tile_full[slots.stage()], slots.phase());
    const int tile = warp_uniform(shared_load(&shared.tile[slots.stage()]));
    warp_barrier();
    arrive(shared.tile_empty[slots.stage()]);
    if (tile < 0) return;

    const Sm90Work work = sm90_work<C>(p, plan.order, tile);
    const ThreadRows<C> rows = thread_rows<C>(p, work.plane, work.first_row + consumer() * kConsumerRows);
    auto& query = shared.query[consumer()];
    OnlineRows<C> online = no_rows<C>();
    float s[C::kKeys / 2], out[C::kDim / 2];
    uint32_t weights[C::kKeys / 16][4];
    float rescale[2];
#pragma unroll
    for (int e = 0; e < C::kDim / 2; ++e) out[e] = 0;

    // Scores to weights, in s.
    const auto soften = [&](int t) {
      const int first_key = t * C::kKeys;
      finish_scores<C>(p, plan.scalars, rows, first_key, has_masked(work.keys, rows, first_key), s);
      exponentiate<C>(online, plan.scalars.exponent, s, rescale);
      if constexpr (C::kGeneral)
        if (p.dropout_p > 0) drop<C>(p, rows, first_key, s);
    };
    // Whether the tile has masked scores (or a general kernel's may have) and values that are not finite.
    const auto is_odd = [&](int t) {
      if (!plan.finite || (!C::kGeneral && !tile_has_masked(work.keys, t * C::kKeys, C::kKeys))) return false;
      const int kv_plane = work.plane / int(p.heads / p.kv_heads);
      return global_load(plan.finite + kv_plane * ceil_div(p.key_length, C::kKeys) + t) == 0;
    };
    // The tensor cores multiply odd tiles as all others, so that their instructions depend on nothing; the sums are then put back.
    volatile float before[C::kDim / 2];  // in memory, not in registers
    const auto keep_output = [&](bool odd) {
      if (!odd) return;
#pragma unroll
      for (int e = 0; e < C::kDim / 2; ++e) before[e] = out[e];
    };
    // What is left of O += P V once the tensor cores are done.
    const auto finish_output = [&](int t, bool odd) {
      wgmma_wait<0>();
      wgmma_hold(out);
      if (odd) {
#pragma unroll
        for (int e = 0; e < C::kDim / 2; ++e) out[e] = before[e];
        multiply_live<C>(p, rows, t * C::kKeys, weights, shared.value[values().stage()], out);
        warp_barrier();
      }
      arrive(shared.value_empty[values().stage()]);
    };

    mbarrier_wait(&shared.query_full, queries.phase());
    if (work.keys.begin < work.keys.end) {
      mbarrier_wait(&shared.key_full[keys().stage()], keys().phase());
      wgmma_fence();
      start_scores<C>(query, shared.key[keys().stage()], s);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_hold(s);
      arrive(shared.key_empty[keys().stage()]);
      taken += 4;
      soften(work.keys.begin);
      narrow_weights<C>(s, weights);

#pragma unroll 1
      for (int t = work.keys.begin + 1; t < work.keys.end; ++t) {
        const bool odd = is_odd(t - 1);
        keep_output(odd);
        mbarrier_wait(&shared.key_full[keys().stage()], keys().phase());
        take_turn();
        wgmma_hold(weights);
        wgmma_hold(out);
        wgmma_fence();
        start_scores<C>(query, shared.key[keys().stage()], s);
        wgmma_commit();
        mbarrier_wait(&shared.value_full[values().stage()], values().phase());
        wgmma_fence();
        start_output<C>(weights, shared.value[values().stage()], out);
        wgmma_commit();
        end_turn();
        wgmma_wait<1>();
        wgmma_hold(s);
        arrive(shared.key_empty[keys().stage()]);
        soften(t);
        finish_output(t - 1, odd);
        taken += 4;
#pragma unroll
        for (int e = 0; e < C::kDim / 2; ++e) out[e] *= rescale[e / 2 % 2];
        narrow_weights<C>(s, weights);
      }

      const bool odd = is_odd(work.keys.end - 1);
      keep_output(odd);
      mbarrier_wait(&shared.value_full[values().stage()], values().phase());
      wgmma_hold(weights);
      wgmma_hold(out);
      wgmma_fence();
      start_output<C>(weights, shared.value[values().stage()], out);
      wgmma_commit();
      finish_output(work.keys.end - 1, odd);
    }

    store_rows<C>(p, plan, rows, online, query, out);
    fence_async();
    named_barrier_wait(kMeet + consumer(), 128);
    if (recomputed(thread_index()) % 128 == 0) {
      const int first_row = rows.first;  // of this thread, and of the consumer
      if (first_row < p.query_length) {
#pragma unroll
        for (int k = 0; k < C::kDim / kPanelCols; ++k)
          if (k * kPanelCols < p.value_dim)
            tensor_store(plan.output.map, reinterpret_cast<const char*>(query.data) + k * query.kPanelBytes,
                         k * kPanelCols, first_row, work.plane % int(p.heads) * plan.output.head_step,
                         work.plane / int(p.heads) * plan.output.batch_step);
        bulk_commit();
        bulk_wait_read<0>();
      }
      mbarrier_arrive(&shared.query_empty);
    }
  }
}

}  // namespace
}  // namespace scaledot
