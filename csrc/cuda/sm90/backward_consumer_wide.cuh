// A consumer of the backward for 256 columns, of which a warpgroup's registers cannot hold all sums. Both warpgroups
// work on the same 64 keys:
//
//   S^T = K Q^T      dP^T = V dO^T      Pd, dX (backward_scores.cuh)      of half of the rows each
//   Pd^T and dX^T, 16-bit, to shared memory, where both warpgroups read all of them
//   dV += Pd^T dO    dK += dX^T Q    dQ = dX K                            half of the columns each
//
// dQ is computed and published in two parts, one before the products of dV and dK and one after them. While those run,
// the copy engine reads the first part, so both parts can use the same buffer.
#pragma once

#include "cuda/sm90/backward_consumer.cuh"

namespace scaledot {
namespace {

template <class C>
struct Sm90WideConsumer {
  using Storage = typename C::Storage;
  using RegisterOperand = uint32_t[C::kScores / 8][4];
  static constexpr int kPanelsOfShare = C::kGradQueryCols / kPanelCols;
  static constexpr int kCols = C::kGradQueryCols;
  static_assert(C::kGradQueryParts == 2 && C::kGradQueryPartCols == kPanelCols);
  const Problem& p;
  const Sm90BackwardPlan& plan;
  Sm90BackwardShared<C>& shared;
  int group;
  float grad_key[C::kGradQueryCols / 2], grad_value[C::kGradQueryCols / 2];

  SCALEDOT_MEMBER int first_col() const { return group * kCols; }
  SCALEDOT_MEMBER Storage* weights() const { return shared.scores[0]; }    // Pd^T
  SCALEDOT_MEMBER Storage* gradients() const { return shared.scores[1]; }  // dX^T

  // The warpgroup's columns of a tile of `rows` rows.
  SCALEDOT_MEMBER const Storage* my_columns(const Storage* tile, int rows) const {
    return tile + group * kPanelsOfShare * rows * kPanelCols;
  }

  // Issues d += A B. A: the tile's 64 keys x kRows rows. B: the warpgroup's columns of kRows rows.
  SCALEDOT_MEMBER void issue_sums(float (&d)[C::kGradQueryCols / 2], const Storage* a, const Storage* b) const {
    const uint64_t of_a = k_major_descriptor(a), of_b = mn_major_descriptor(my_columns(b, C::kRows), C::kRows * 128);
    fence_operand(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kRows / 16; ++k)
      wgmma<C::kGradQueryCols, Major::k, Major::mn>(d, advance_descriptor(of_a, k * 32),
                                                    advance_descriptor(of_b, k * 16 * 128), true, Type<Storage>{});
    wgmma_commit();
  }

  // Issues part `part` of dQ = dX K.
  SCALEDOT_MEMBER void issue_grad_query(float (&sums)[C::kGradQueryPartCols / 2], int part) const {
    const Storage* columns = my_columns(shared.key, C::kKeys) + part * C::kKeys * kPanelCols;
    const uint64_t of_a = mn_major_descriptor(gradients(), C::kKeys * 128),
                   of_b = mn_major_descriptor(columns, C::kKeys * 128);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kKeys / 16; ++k)
      wgmma<C::kGradQueryPartCols, Major::mn, Major::mn>(
          sums, advance_descriptor(of_a, k * 16 * 128), advance_descriptor(of_b, k * 16 * 128), k > 0, Type<Storage>{});
    wgmma_commit();
  }

  // Writes Pd^T and dX^T of the warpgroup's rows to shared memory. At the end, those of both warpgroups are there.
  template <bool kMasked>
  SCALEDOT_MEMBER void publish_scores(const Sm90BackwardStep& step, const LiveBand& band) const {
    const Sm90BackwardLayout layout = backward_layout<C>(group);
    const int stage = Ring<C::kQueryStages>{step.number}.stage();
    const Sm90RowStatistics* statistics = shared.statistics[stage];
    const uint8_t* kept = draw_kept_weights<C>(p, shared, step, group);
    float s[C::kScores], dp[C::kScores];
    issue_scores<C>(shared, step, layout, s, dp);
    if constexpr (C::kGeneral) {
      wgmma_wait<0>();
      fence_operand(s);
      fence_operand(dp);
      general_scores<C>(p, general_options(p, kMasked), s, dp, statistics, shared.positions[stage], kept, band.rows,
                        backward_keys(p, shared_load(&shared.task.tile), C::kKeys), layout);
    } else {
      wgmma_wait<1>();
      fence_operand(s);
      const uint32_t masked = kMasked ? outside_band<C>(band, layout) : 0;
      weights_of_products<kMasked>(s, statistics, float(p.scale) * float(kLog2e), layout, masked);
      wgmma_wait<0>();
      fence_operand(dp);
      gradients_of_products<kMasked>(s, dp, statistics, layout, masked);
    }
    RegisterOperand narrow_s, narrow_dp;
    narrow_scores<Storage>(s, narrow_s);
    narrow_scores<Storage>(dp, narrow_dp);
    sync_consumers();  // the products that read the last step's are done
    store_scores(weights(), narrow_s, layout);
    store_scores(gradients(), narrow_dp, layout);
    fence_async();
    sync_consumers();
  }
  SCALEDOT_MEMBER void sync_consumers() const { named_barrier_wait(kAllConsumers, C::kConsumers * kWarpgroupThreads); }

  // One tile of rows. kMasked: some of its scores may be masked.
  template <bool kMasked>
  SCALEDOT_MEMBER void run_step(const Sm90BackwardStep& step, const LiveBand& band) {
    publish_scores<kMasked>(step, band);
    const int query_stage = Ring<C::kQueryStages>{step.number}.stage();
    const int grad_stage = Ring<C::kGradStages>{step.number}.stage();
    const auto issue_grad_key_value = [&] {
      issue_sums(grad_value, weights(), shared.grad_output[grad_stage]);
      issue_sums(grad_key, gradients(), shared.query[query_stage]);
    };
    const auto release_grad = [&] {
      fence_operand(grad_value);
      release_stage(&shared.grad_empty[grad_stage]);
    };
    const auto release_query = [&] {
      fence_operand(grad_key);
      release_stage(&shared.query_empty[query_stage]);
    };
    if (!plan.grad_query) {
      issue_grad_key_value();
      wgmma_wait<1>();
      release_grad();
      wgmma_wait<0>();
      release_query();
      return;
    }
    float sums[C::kGradQueryPartCols / 2];
    issue_grad_query(sums, 0);
    issue_grad_key_value();
    wgmma_wait<2>();
    fence_operand(sums);
    publish_grad_query<C>(shared, group, step.number == 0, sums);
    issue_grad_query(sums, 1);
    wgmma_wait<2>();
    release_grad();
    wgmma_wait<1>();
    release_query();
    wgmma_wait<0>();
    fence_operand(sums);
    publish_grad_query<C>(shared, group, false, sums);
  }
};

}  // namespace
}  // namespace scaledot
