// A consumer of the backward for 192 and 256 columns, of which a warpgroup's registers cannot hold all sums. Both
// warpgroups work on the same 64 keys:
//
//   S^T = K Q^T      dP^T = V dO^T      Pd, dX (backward_scores.cuh)      of half of the rows each
//   Pd^T and dX^T, 16-bit, to shared memory, where both warpgroups read all of them
//   dV += Pd^T dO    dK += dX^T Q    dQ = dX K                            half of the columns each
//
// dV runs while dX is computed. dQ is published in parts, which use the same buffer one after the other. Behind it S^T
// of the next row tile is computed.
#pragma once

#include "cuda/sm90/backward_consumer.cuh"

namespace scaledot {
namespace {

template <class C>
struct Sm90WideConsumer {
  using Storage = typename C::Storage;
  using RegisterOperand = uint32_t[C::kScores / 8][4];
  static constexpr bool kIssuesAhead = !C::kGeneral;  // a general kernel has no registers for it
  const Problem& p;
  const Sm90BackwardPlan& plan;
  Sm90BackwardShared<C>& shared;
  int group;
  float grad_key[C::kGradQueryCols / 2], grad_value[C::kValueDim / C::kConsumers / 2];
  float s[C::kScores];  // S^T, then P^T

  // The warpgroup's columns of sums, and of a tile of `rows` rows.
  template <int kCount>
  SCALEDOT_MEMBER int first_col(const float (&)[kCount]) const {
    return group * 2 * kCount;
  }
  template <int kCols>
  SCALEDOT_MEMBER const Storage* my_columns(const Storage* tile, int rows) const {
    return tile + group * kCols * rows;
  }
  // Pd^T. The product that read this buffer, two steps ago, was done before the last barrier of all consumers.
  SCALEDOT_MEMBER Storage* weights(uint32_t step) const { return shared.scores[step % 2]; }
  SCALEDOT_MEMBER Storage* gradients() const { return shared.scores[2]; }  // dX^T

  SCALEDOT_MEMBER void begin() {
    if constexpr (!kIssuesAhead) return;
    issue_scores<C>(shared, 0, backward_layout<C>(group), s);
    wgmma_wait<0>();
    fence_operand(s);
  }

  // Issues d += A B. A: the tile's 64 keys x kRows rows. B: the warpgroup's columns of kRows rows.
  template <int kCount>
  SCALEDOT_MEMBER void issue_sums(float (&d)[kCount], const Storage* a, const Storage* b) const {
    const uint64_t of_a = k_major_descriptor(a),
                   of_b = mn_major_descriptor(my_columns<2 * kCount>(b, C::kRows), C::kRows * 128);
    fence_operand(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kRows / 16; ++k)
      wgmma<2 * kCount, Major::k, Major::mn>(d, advance_descriptor(of_a, k * 32),
                                             advance_descriptor(of_b, k * 16 * 128), true, Type<Storage>{});
    wgmma_commit();
  }

  // Issues dQ = dX K.
  SCALEDOT_MEMBER void issue_grad_query(float (&sums)[C::kGradQueryCols / 2]) const {
    const uint64_t of_a = mn_major_descriptor(gradients(), C::kKeys * 128),
                   of_b = mn_major_descriptor(my_columns<C::kGradQueryCols>(shared.key, C::kKeys), C::kKeys * 128);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kKeys / 16; ++k)
      wgmma<C::kGradQueryCols, Major::mn, Major::mn>(sums, advance_descriptor(of_a, k * 16 * 128),
                                                     advance_descriptor(of_b, k * 16 * 128), k > 0, Type<Storage>{});
    wgmma_commit();
  }
  SCALEDOT_MEMBER void publish_part(const float (&sums)[C::kGradQueryCols / 2], int part, bool first) const {
    float mine[C::kGradQueryPartCols / 2];
#pragma unroll
    for (int k = 0; k < C::kGradQueryPartCols / 2; ++k) mine[k] = sums[part * C::kGradQueryPartCols / 2 + k];
    publish_grad_query<C>(shared, group, first, mine);
  }

  // Stores Pd^T or dX^T of the warpgroup's rows to shared memory. At the end, those of both warpgroups are there.
  SCALEDOT_MEMBER void share(const float (&x)[C::kScores], Storage* to, const Sm90BackwardLayout& layout) const {
    RegisterOperand narrowed;
    narrow_scores<Storage>(x, narrowed);
    store_scores<C>(to, narrowed, layout);
    fence_async();
    named_barrier_wait(kAllConsumers, C::kConsumers * kWarpgroupThreads);
  }

  // Pd^T and dX^T in shared memory. dV is still being computed.
  template <bool kMasked>
  SCALEDOT_MEMBER void compute_gradients(const Sm90BackwardStep& step, const LiveBand& band) {
    const Sm90BackwardLayout layout = backward_layout<C>(group);
    const int stage = Ring<C::kQueryStages>{step.number}.stage();
    const typename C::Statistics& statistics = shared.statistics[stage];
    const Storage* grad_output = shared.grad_output[Ring<C::kGradStages>{step.number}.stage()];
    const uint8_t* keep_mask = draw_keep_mask<C>(p, shared, step, group);
    float dp[C::kScores];
    if constexpr (!kIssuesAhead) issue_scores<C>(shared, step.number, layout, s);
    issue_weight_gradients<C>(shared, step.number, layout, dp);
    uint32_t masked = 0;
    if constexpr (C::kGeneral) {
      wgmma_wait<0>();
      fence_operand(s);
      fence_operand(dp);
      general_scores<C>(p, general_options(p, kMasked), s, dp, statistics.row, shared.positions[stage], keep_mask,
                        band.rows, backward_keys(p, shared_load(&shared.task.tile), C::kKeys), layout);
    } else {
      masked = kMasked ? outside_band<C>(band, layout) : 0;
      weights_of_products<kMasked>(s, statistics.lse2, float(p.scale) * float(kLog2e), layout, masked);
    }
    share(s, weights(step.number), layout);
    issue_sums(grad_value, weights(step.number), grad_output);
    if constexpr (!C::kGeneral) {
      wgmma_wait<1>();
      fence_operand(dp);
      gradients_of_products<kMasked>(s, dp, statistics.delta, layout, masked);
    }
    // The products that read the last step's were done before the barrier after the weights.
    share(dp, gradients(), layout);
  }

  // One tile of rows. kMasked: some of its scores may be masked.
  template <bool kMasked, class LookAhead>
  SCALEDOT_MEMBER void run_step(const Sm90BackwardStep& step, const LiveBand& band, const LookAhead& look_ahead) {
    compute_gradients<kMasked>(step, band);
    const uint32_t number = step.number;
    const int query_stage = Ring<C::kQueryStages>{number}.stage();
    const auto issue_grad_key = [&] { issue_sums(grad_key, gradients(), shared.query[query_stage]); };
    const auto issue_ahead = [&] {
      const bool more = look_ahead();
      if constexpr (!kIssuesAhead) return;
      // After the last step, once more its own scores, which nobody uses.
      issue_scores<C>(shared, more ? number + 1 : number, backward_layout<C>(group), s);
    };
    const auto release_grad = [&] {
      fence_operand(grad_value);
      release_stage(&shared.grad_empty[Ring<C::kGradStages>{number}.stage()]);
    };
    if (plan.grad_query) {
      float sums[C::kGradQueryCols / 2];
      issue_grad_query(sums);
      issue_grad_key();
      issue_ahead();
      constexpr int kAfter = kIssuesAhead ? 2 : 1;  // groups after dQ
      wgmma_wait<kAfter + 1>();
      release_grad();
      wgmma_wait<kAfter>();
      fence_operand(sums);
#pragma unroll
      for (int part = 0; part < C::kGradQueryParts; ++part) publish_part(sums, part, number == 0 && part == 0);
    } else {
      issue_grad_key();
      issue_ahead();
      wgmma_wait<kIssuesAhead ? 2 : 1>();
      release_grad();
    }
    wgmma_wait<kIssuesAhead ? 1 : 0>();
    fence_operand(grad_key);
    release_stage(&shared.query_empty[query_stage]);
    if constexpr (kIssuesAhead) {
      wgmma_wait<0>();
      fence_operand(s);
    }
  }
};

}  // namespace
}  // namespace scaledot
