// A consumer of the backward for up to 128 columns: one warpgroup, with 64 keys, all rows and all columns. It
// takes 64 rows at a time (a row part):
//
//   S^T = K Q^T      dP^T = V dO^T      Pd, dX (backward_scores.cuh)
//   dV += Pd^T dO    dK += dX^T Q       with Pd^T and dX^T in registers
//
// and then, for all rows of the step,
//
//   dQ = dX K        64 of the rows or half of the columns, for both warpgroups' keys: dX goes through shared memory
//
// With 64 columns, S^T of the next row part is queued behind the products of this one.
#pragma once

#include "cuda/sm90/backward_consumer.cuh"

namespace scaledot {
namespace {

// Issues d += A B. A: 64 keys x kScoreRows rows, in registers. B: these rows, in panels of kRows rows.
template <class C>
SCALEDOT_DEVICE void issue_from_registers(float (&d)[C::kDim / 2], const uint32_t (&a)[C::kScores / 8][4],
                                          const typename C::Storage* b) {
  const uint64_t of_b = mn_major_descriptor(b, C::kRows * 128);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < C::kScoreRows / 16; ++k)
    wgmma<C::kDim, Major::mn>(d, a[k], advance_descriptor(of_b, k * 16 * 128), true, Type<typename C::Storage>{});
  wgmma_commit();
}

template <class C>
struct Sm90NarrowConsumer {
  using Storage = typename C::Storage;
  using RegisterOperand = uint32_t[C::kScores / 8][4];
  // Whether S^T of the next row part is issued before this one is done. With 128 columns, or in a general kernel, there
  // are no registers for it.
  static constexpr bool kIssuesAhead = !C::kGeneral && C::kDim <= 64;
  const Problem& p;
  const Sm90BackwardPlan& plan;
  Sm90BackwardShared<C>& shared;
  int group;
  float grad_key[C::kDim / 2], grad_value[C::kDim / 2];
  float scores_of_part[kIssuesAhead ? C::kRowParts : 1][C::kScores];  // S^T, then P^T

  SCALEDOT_MEMBER static int first_col(const float (&)[C::kDim / 2]) { return 0; }

  SCALEDOT_MEMBER void begin() {
    if constexpr (!kIssuesAhead) return;
    issue_scores<C>(shared, 0, backward_layout<C>(group), scores_of_part[0]);
    wgmma_wait<0>();
    fence_operand(scores_of_part[0]);
  }

  // One tile of rows. kMasked: some of its scores may be masked.
  template <bool kMasked, class LookAhead>
  SCALEDOT_MEMBER void run_step(const Sm90BackwardStep& step, const LiveBand& band, const LookAhead& look_ahead) {
    static_assert(C::kQueryStages == C::kGradStages);
    // The products that read this buffer, two steps ago, were done before the last barrier of all consumers.
    Storage* gradient_tile = shared.scores[step.number % 2];
    RegisterOperand weights, gradients;
#pragma unroll(C::kGeneral ? 1 : C::kRowParts)
    for (int part = 0; part < C::kRowParts; ++part) {
      if (part > 0) issue_grad_key(gradients, step, part - 1);
      compute_gradients<kMasked>(step, band, part, gradient_tile, weights, gradients);
    }
    fence_async();
    named_barrier_wait(kAllConsumers, C::kConsumers * kWarpgroupThreads);

    // dQ leaves while dK is computed. A general kernel has no registers for that.
    const uint32_t number = step.number;
    const auto release_grad_output = [&] {
      fence_operand(weights);
      fence_operand(grad_value);
      release_stage(&shared.grad_empty[Ring<C::kGradStages>{number}.stage()]);
    };
    constexpr int kAhead = kIssuesAhead ? 1 : 0;
    const auto issue_rest = [&] {
      issue_grad_key(gradients, step, C::kRowParts - 1);
      const bool more = look_ahead();
      if constexpr (!kIssuesAhead) return;
      // After the last step, once more its own scores, which nobody uses.
      issue_scores<C>(shared, more ? number + 1 : number, backward_layout<C>(group), scores_of_part[0]);
    };
    if (plan.grad_query) {
      float sums[C::kGradQueryCols / 2];
      issue_grad_query(sums, gradient_tile);
      issue_rest();
      wgmma_wait<C::kGeneral ? 0 : kAhead + 1>();
      release_grad_output();
      fence_operand(sums);
      publish_grad_query<C>(shared, group, number == 0, sums);
    } else {
      issue_rest();
      wgmma_wait<kAhead + 1>();
      release_grad_output();
    }
    wgmma_wait<kAhead>();
    fence_operand(gradients);
    fence_operand(grad_key);
    release_stage(&shared.query_empty[Ring<C::kQueryStages>{number}.stage()]);
    if constexpr (kIssuesAhead) {
      wgmma_wait<0>();
      fence_operand(scores_of_part[0]);
    }
  }

  // From S^T of a row part to its dX^T, in registers and in shared memory. dV is still being computed.
  template <bool kMasked>
  SCALEDOT_MEMBER void compute_gradients(const Sm90BackwardStep& step, const LiveBand& band, int part,
                                         Storage* gradient_tile, RegisterOperand& weights, RegisterOperand& gradients) {
    const Sm90BackwardLayout layout = backward_layout<C>(group, part);
    const int stage = Ring<C::kQueryStages>{opt_barrier(step.number)}.stage();
    const typename C::Statistics& statistics = shared.statistics[stage];
    const Storage* grad_output = shared.grad_output[stage] + part * C::kScoreRows * kPanelCols;
    const uint8_t* keep_mask = draw_keep_mask<C>(p, shared, step, group, part);
    const bool ahead = kIssuesAhead && part + 1 < C::kRowParts;
    float(&s)[C::kScores] = scores_of_part[kIssuesAhead ? part : 0];
    float dp[C::kScores];
    if constexpr (!kIssuesAhead) issue_scores<C>(shared, step.number, layout, s);
    issue_weight_gradients<C>(shared, step.number, layout, dp);
    if (ahead) issue_scores<C>(shared, step.number, backward_layout<C>(group, part + 1), scores_of_part[part + 1]);

    uint32_t masked = 0;
    if constexpr (C::kGeneral) {
      wgmma_wait<0>();
      fence_operand(s);
      fence_operand(dp);
      if (part > 0) {
        fence_operand(weights);
        fence_operand(grad_value);
        fence_operand(gradients);
        fence_operand(grad_key);
      }
      general_scores<C>(p, general_options(p, kMasked), s, dp, statistics.row, shared.positions[stage], keep_mask,
                        band.rows, backward_keys(p, shared_load(&shared.task.tile), C::kKeys), layout);
    } else {
      // While P is computed: dP, and S of the next part or dK of the last one. While dS is: dV.
      if (!kIssuesAhead) {
        wgmma_wait<1>();
        fence_operand(s);
      } else if (part > 0) {
        wgmma_wait<2>();
        fence_operand(s);
        fence_operand(weights);
        fence_operand(grad_value);
      }
      if (kMasked) masked = outside_band<C>(band, layout);
      weights_of_products<kMasked>(s, statistics.lse2, float(p.scale) * float(kLog2e), layout, masked);
    }

    // dV += Pd^T dO
    narrow_scores<Storage>(s, weights);
    issue_from_registers<C>(grad_value, weights, grad_output);
    if constexpr (!C::kGeneral) {
      if (ahead)
        wgmma_wait<2>();
      else
        wgmma_wait<1>();
      fence_operand(dp);
      if (part > 0) {
        fence_operand(gradients);
        fence_operand(grad_key);
      }
      gradients_of_products<kMasked>(s, dp, statistics.delta, layout, masked);
    }
    narrow_scores<Storage>(dp, gradients);
    store_scores<C>(gradient_tile, gradients, layout);
  }

  // dQ of the step's rows = dX K: the warpgroup's share, for all keys.
  SCALEDOT_MEMBER void issue_grad_query(float (&sums)[C::kGradQueryCols / 2], const Storage* scores) const {
    const int panel = group * C::kKeys * kPanelCols;  // of dX or of K
    const uint64_t a = mn_major_descriptor(scores + (C::kSplitsRows ? panel : 0), C::kKeys * 128);
    const uint64_t b = mn_major_descriptor(shared.key + (C::kSplitsRows ? 0 : panel), C::kKeys * 128);
    static_assert(C::kGradQueryCols == kPanelCols);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kKeys / 16; ++k)
      wgmma<C::kGradQueryCols, Major::mn, Major::mn>(sums, advance_descriptor(a, k * 16 * 128),
                                                     advance_descriptor(b, k * 16 * 128), k > 0, Type<Storage>{});
    wgmma_commit();
  }

  // dK += dX^T Q
  SCALEDOT_MEMBER void issue_grad_key(RegisterOperand& gradients, const Sm90BackwardStep& step, int part) {
    const int stage = Ring<C::kQueryStages>{opt_barrier(step.number)}.stage();
    issue_from_registers<C>(grad_key, gradients, shared.query[stage] + part * C::kScoreRows * kPanelCols);
  }
};

}  // namespace
}  // namespace scaledot
