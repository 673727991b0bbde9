// Consumers of the backward up to 128 columns: a warpgroup has 64 keys, all rows and all columns.
//
//   S^T = K Q^T      dP^T = V dO^T      Pd, dX (backward_scores.cuh)
//   dV += Pd^T dO    dK += dX^T Q       with Pd^T and dX^T in registers
//   dQ = dX K                           half of the columns; dX of both warpgroups through shared memory
#pragma once

#include "cuda/sm90/backward_products.cuh"

namespace scaledot {
namespace {

// d += A B, A in registers: 64 keys x kRows rows; B: kRows rows in panels.
template <class C>
SCALEDOT_DEVICE void multiply_registers(float (&d)[C::kDim / 2], const uint32_t (&a)[C::kScores / 8][4],
                                        const typename C::Storage* b) {
  const uint64_t of_b = operand_mn(b, C::kRows * 128);
#pragma unroll
  for (int k = 0; k < C::kRows / 16; ++k)
    wgmma<C::kDim, Major::mn>(d, a[k], operand_at(of_b, k * 16 * 128), true, Type<typename C::Storage>{});
}

template <class C>
struct NarrowConsumer {
  using Storage = typename C::Storage;
  using Operand = uint32_t[C::kScores / 8][4];
  const Problem& p;
  const BackwardPlan90& plan;
  BackwardShared90<C>& shared;
  int group;
  float grad_key[C::kDim / 2], grad_value[C::kDim / 2];

  // One tile of rows. kMasked: some of its scores are masked.
  template <bool kMasked>
  SCALEDOT_MEMBER void tile(const BackwardStep& step, const Band& band) {
    const KeyLane lane = key_lane<C>(group);
    static_assert(C::kQueryStages == C::kGradStages);
    const int stage = Ring<C::kQueryStages>{recomputed(step.number)}.stage();
    const Storage* query = shared.query[stage];
    const Storage* grad_output = shared.grad_output[stage];
    const RowTerms* terms = shared.terms[stage];
    Storage* scores =
        shared.scores[step.number % 2];  // what lay there was used before the last barrier of all consumers
    const uint8_t* kept = kept_weights<C>(p, shared, step, group);
    float s[C::kScores], dp[C::kScores];
    Operand weights, gradients;
    start_scores<C>(shared, step, lane, s, dp);

    uint32_t masked = 0;
    if constexpr (C::kGeneral) {
      wgmma_wait<0>();
      wgmma_hold(s);
      wgmma_hold(dp);
      general_scores<C>(p, general_terms(p, kMasked), s, dp, terms, shared.positions[stage], kept, band.rows,
                        backward_keys(p, shared_load(&shared.task.tile), C::kKeys), lane);
    } else {
      // dP arrives while P is computed, and dV while dS is.
      wgmma_wait<1>();
      wgmma_hold(s);
      if (kMasked) masked = outside_band<C>(band, lane);
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
    store_scores(scores, gradients, lane);
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
      release_tile(step, weights, gradients);
      wgmma_wait<0>();
      wgmma_hold(sums);
      leave_sums<C>(shared, group, step.number == 0, sums);
    } else {
      wgmma_wait<0>();
      release_tile(step, weights, gradients);
    }
  }

  // The products that read the tile of rows are done.
  SCALEDOT_MEMBER void release_tile(const BackwardStep& step, Operand& weights, Operand& gradients) {
    wgmma_hold(weights);
    wgmma_hold(gradients);
    wgmma_hold(grad_value);
    wgmma_hold(grad_key);
    release(&shared.query_empty[Ring<C::kQueryStages>{step.number}.stage()]);
    release(&shared.grad_empty[Ring<C::kGradStages>{step.number}.stage()]);
  }
};

template <class C>
SCALEDOT_DEVICE void consume_narrow(const Problem& p, const BackwardPlan90& plan, BackwardShared90<C>& shared,
                                    int group) {
  NarrowConsumer<C> consumer = {p, plan, shared, group, {}, {}};
#pragma unroll
  for (int k = 0; k < C::kDim / 2; ++k) consumer.grad_key[k] = consumer.grad_value[k] = 0;
  mbarrier_wait(&shared.loaded, 0);
  for_each_band<C>(p, shared, [&](const BackwardStep& step, const Band& band, bool masks) {
    if (masks)
      consumer.template tile<true>(step, band);
    else
      consumer.template tile<false>(step, band);
  });
  const KeyLane lane = key_lane<C>(group);
  const BackwardTask task = shared_load(&shared.task);
  store_gradient<C>(p, p.grad_key, task, lane, 0, p.head_dim, float(p.scale), consumer.grad_key);
  store_gradient<C>(p, p.grad_value, task, lane, 0, p.value_dim, 1, consumer.grad_value);
}

}  // namespace
}  // namespace scaledot
