// A consumer of the backward for up to 128 columns: one warpgroup, with 64 keys, all rows and all columns.
//
//   S^T = K Q^T      dP^T = V dO^T      Pd, dX (backward_scores.cuh)
//   dV += Pd^T dO    dK += dX^T Q       with Pd^T and dX^T in registers
//   dQ = dX K                           half of the columns, for both warpgroups' keys: dX goes through shared memory
#pragma once

#include "cuda/sm90/backward_consumer.cuh"

namespace scaledot {
namespace {

// Issues d += A B. A: 64 keys x kRows rows, in registers. B: kRows rows, in panels.
template <class C>
SCALEDOT_DEVICE void issue_from_registers(float (&d)[C::kDim / 2], const uint32_t (&a)[C::kScores / 8][4],
                                          const typename C::Storage* b) {
  const uint64_t of_b = mn_major_descriptor(b, C::kRows * 128);
#pragma unroll
  for (int k = 0; k < C::kRows / 16; ++k)
    wgmma<C::kDim, Major::mn>(d, a[k], advance_descriptor(of_b, k * 16 * 128), true, Type<typename C::Storage>{});
}

template <class C>
struct Sm90NarrowConsumer {
  using Storage = typename C::Storage;
  using RegisterOperand = uint32_t[C::kScores / 8][4];
  const Problem& p;
  const Sm90BackwardPlan& plan;
  Sm90BackwardShared<C>& shared;
  int group;
  static constexpr int kCols = C::kDim;
  float grad_key[C::kDim / 2], grad_value[C::kDim / 2];

  SCALEDOT_MEMBER static int first_col() { return 0; }

  // One tile of rows. kMasked: some of its scores may be masked.
  template <bool kMasked>
  SCALEDOT_MEMBER void run_step(const Sm90BackwardStep& step, const LiveBand& band) {
    const Sm90BackwardLayout layout = backward_layout<C>(group);
    static_assert(C::kQueryStages == C::kGradStages);
    const int stage = Ring<C::kQueryStages>{opt_barrier(step.number)}.stage();
    const Storage* grad_output = shared.grad_output[stage];
    const Sm90RowStatistics* statistics = shared.statistics[stage];
    // The products that read this buffer, two steps ago, were done before the last barrier of all consumers.
    Storage* scores = shared.scores[step.number % 2];
    const uint8_t* kept = draw_kept_weights<C>(p, shared, step, group);
    float s[C::kScores], dp[C::kScores];
    RegisterOperand weights, gradients;
    issue_scores<C>(shared, step, layout, s, dp);

    uint32_t masked = 0;
    if constexpr (C::kGeneral) {
      wgmma_wait<0>();
      fence_operand(s);
      fence_operand(dp);
      general_scores<C>(p, general_options(p, kMasked), s, dp, statistics, shared.positions[stage], kept, band.rows,
                        backward_keys(p, shared_load(&shared.task.tile), C::kKeys), layout);
    } else {
      // dP is computed while P is, and dV while dS is.
      wgmma_wait<1>();
      fence_operand(s);
      if (kMasked) masked = outside_band<C>(band, layout);
      weights_of_products<kMasked>(s, statistics, float(p.scale) * float(kLog2e), layout, masked);
    }

    // dV += Pd^T dO
    narrow_scores<Storage>(s, weights);
    wgmma_fence();
    issue_from_registers<C>(grad_value, weights, grad_output);
    wgmma_commit();
    if constexpr (!C::kGeneral) {
      wgmma_wait<1>();
      fence_operand(dp);
      gradients_of_products<kMasked>(s, dp, statistics, layout, masked);
    }

    narrow_scores<Storage>(dp, gradients);
    store_scores(scores, gradients, layout);
    fence_async();
    named_barrier_wait(kAllConsumers, C::kConsumers * kWarpgroupThreads);

    // dQ leaves while dK is computed. A general kernel has no registers for that.
    if (plan.grad_query) {
      float sums[C::kGradQueryCols / 2];
      issue_grad_query(sums, scores);
      issue_grad_key(gradients, step);
      wgmma_wait<C::kGeneral ? 0 : 1>();
      release_grad_output(step, weights);
      if constexpr (C::kGeneral) release_query(step, gradients);
      fence_operand(sums);
      publish_grad_query<C>(shared, group, step.number == 0, sums);
      if constexpr (C::kGeneral) return;
    } else {
      issue_grad_key(gradients, step);
      wgmma_wait<1>();
      release_grad_output(step, weights);
    }
    wgmma_wait<0>();
    release_query(step, gradients);
  }

  // dQ of the step's rows = dX K: the warpgroup's columns, for all keys.
  SCALEDOT_MEMBER void issue_grad_query(float (&sums)[C::kGradQueryCols / 2], const Storage* scores) const {
    constexpr int kColumnBytes = C::kGradQueryCols * 2;  // of the 128 bytes of a panel's row
    const int first_byte = group * kColumnBytes;
    const char* columns = reinterpret_cast<const char*>(shared.key) + first_byte / 128 * C::kKeys * 128;
    const uint64_t a = mn_major_descriptor(scores, C::kKeys * 128);
    const uint64_t b = mn_major_descriptor(columns + first_byte % 128, C::kKeys * 128);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kKeys / 16; ++k)
      wgmma<C::kGradQueryCols, Major::mn, Major::mn>(sums, advance_descriptor(a, k * 16 * 128),
                                                     advance_descriptor(b, k * 16 * 128), k > 0, Type<Storage>{});
    wgmma_commit();
  }

  // dK += dX^T Q
  SCALEDOT_MEMBER void issue_grad_key(RegisterOperand& gradients, const Sm90BackwardStep& step) {
    const int stage = Ring<C::kQueryStages>{opt_barrier(step.number)}.stage();
    wgmma_fence();
    issue_from_registers<C>(grad_key, gradients, shared.query[stage]);
    wgmma_commit();
  }

  // Release the row tile's parts whose products are done.
  SCALEDOT_MEMBER void release_grad_output(const Sm90BackwardStep& step, RegisterOperand& weights) {
    fence_operand(weights);
    fence_operand(grad_value);
    release_stage(&shared.grad_empty[Ring<C::kGradStages>{step.number}.stage()]);
  }
  SCALEDOT_MEMBER void release_query(const Sm90BackwardStep& step, RegisterOperand& gradients) {
    fence_operand(gradients);
    fence_operand(grad_key);
    release_stage(&shared.query_empty[Ring<C::kQueryStages>{step.number}.stage()]);
  }
};

}  // namespace
}  // namespace scaledot
