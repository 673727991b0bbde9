// Consumers of the backward for 256 columns, whose sums would not all fit into a warpgroup's registers. Both work on
// the same 64 keys:
//
//   S^T = K Q^T      dP^T = V dO^T      Pd, dX (backward_scores.cuh)      of half of the rows each
//   Pd^T and dX^T, 16-bit, to shared memory, where both warpgroups read all of them
//   dV += Pd^T dO    dK += dX^T Q    dQ = dX K                            half of the columns each
//
// dQ is made and left to be added in two parts, one before the products of dV and dK and one behind them: while they
// run the copy engine has the time to take the first part, so that both can lie in the same place.
#pragma once

#include "cuda/sm90/backward_products.cuh"

namespace scaledot {
namespace {

template <class C>
struct WideConsumer {
  using Storage = typename C::Storage;
  using Operand = uint32_t[C::kScores / 8][4];
  static constexpr int kPanelsOfShare = C::kShare / kPanelCols;
  static_assert(C::kParts == 2 && C::kPartCols == kPanelCols);
  const Problem& p;
  const BackwardPlan90& plan;
  BackwardShared90<C>& shared;
  int group;
  float grad_key[C::kShare / 2], grad_value[C::kShare / 2];

  SCALEDOT_MEMBER Storage* weights() const { return shared.scores[0]; }    // Pd^T
  SCALEDOT_MEMBER Storage* gradients() const { return shared.scores[1]; }  // dX^T

  // The warpgroup's columns of a tile of `rows` rows.
  SCALEDOT_MEMBER const Storage* my_columns(const Storage* tile, int rows) const {
    return tile + group * kPanelsOfShare * rows * kPanelCols;
  }

  // d += A B, started: A the tile's 64 keys x kRows rows, B the warpgroup's columns of kRows rows.
  SCALEDOT_MEMBER void start_sums(float (&d)[C::kShare / 2], const Storage* a, const Storage* b) const {
    const uint64_t of_a = operand_k(a), of_b = operand_mn(my_columns(b, C::kRows), C::kRows * 128);
    wgmma_hold(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kRows / 16; ++k)
      wgmma<C::kShare, Major::k, Major::mn>(d, operand_at(of_a, k * 32), operand_at(of_b, k * 16 * 128), true,
                                            Type<Storage>{});
    wgmma_commit();
  }

  // Part `part` of dQ = dX K, started.
  SCALEDOT_MEMBER void start_part(float (&sums)[C::kPartCols / 2], int part) const {
    const Storage* columns = my_columns(shared.key, C::kKeys) + part * C::kKeys * kPanelCols;
    const uint64_t of_a = operand_mn(gradients(), C::kKeys * 128), of_b = operand_mn(columns, C::kKeys * 128);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kKeys / 16; ++k)
      wgmma<C::kPartCols, Major::mn, Major::mn>(sums, operand_at(of_a, k * 16 * 128), operand_at(of_b, k * 16 * 128),
                                                k > 0, Type<Storage>{});
    wgmma_commit();
  }

  // Pd^T and dX^T of the warpgroup's rows, in shared memory when all threads have come back.
  template <bool kMasked>
  SCALEDOT_MEMBER void make_scores(const BackwardStep& step, const Band& band) const {
    const KeyLane lane = key_lane<C>(group);
    const int stage = Ring<C::kQueryStages>{step.number}.stage();
    const RowTerms* terms = shared.terms[stage];
    const uint8_t* kept = kept_weights<C>(p, shared, step, group);
    float s[C::kScores], dp[C::kScores];
    start_scores<C>(shared, step, lane, s, dp);
    if constexpr (C::kGeneral) {
      wgmma_wait<0>();
      wgmma_hold(s);
      wgmma_hold(dp);
      general_scores<C>(p, general_terms(p, kMasked), s, dp, terms, shared.positions[stage], kept, band.rows,
                        backward_keys(p, shared_load(&shared.task.tile), C::kKeys), lane);
    } else {
      wgmma_wait<1>();
      wgmma_hold(s);
      const uint32_t masked = kMasked ? outside_band<C>(band, lane) : 0;
      weights_of_products<kMasked>(s, terms, float(p.scale) * kLog2E, lane, masked);
      wgmma_wait<0>();
      wgmma_hold(dp);
      gradients_of_products<kMasked>(s, dp, terms, lane, masked);
    }
    Operand narrow_s, narrow_dp;
    narrow_scores<Storage>(s, narrow_s);
    narrow_scores<Storage>(dp, narrow_dp);
    meet();  // the products that read the last tile's are done
    store_scores(weights(), narrow_s, lane);
    store_scores(gradients(), narrow_dp, lane);
    fence_async();
    meet();
  }
  SCALEDOT_MEMBER void meet() const { named_barrier_wait(kAllConsumers, C::kConsumers * kWarpgroupThreads); }

  // One tile of rows. kMasked: some of its scores are masked.
  template <bool kMasked>
  SCALEDOT_MEMBER void tile(const BackwardStep& step, const Band& band) {
    make_scores<kMasked>(step, band);
    const int query_stage = Ring<C::kQueryStages>{step.number}.stage();
    const int grad_stage = Ring<C::kGradStages>{step.number}.stage();
    const auto start_key_and_value = [&] {
      start_sums(grad_value, weights(), shared.grad_output[grad_stage]);
      start_sums(grad_key, gradients(), shared.query[query_stage]);
    };
    const auto release_grad = [&] {
      wgmma_hold(grad_value);
      release(&shared.grad_empty[grad_stage]);
    };
    const auto release_query = [&] {
      wgmma_hold(grad_key);
      release(&shared.query_empty[query_stage]);
    };
    if (!plan.grad_query) {
      start_key_and_value();
      wgmma_wait<1>();
      release_grad();
      wgmma_wait<0>();
      release_query();
      return;
    }
    float sums[C::kPartCols / 2];
    start_part(sums, 0);
    start_key_and_value();
    wgmma_wait<2>();
    wgmma_hold(sums);
    leave_sums<C>(shared, group, step.number == 0, sums);
    start_part(sums, 1);
    wgmma_wait<2>();
    release_grad();
    wgmma_wait<1>();
    release_query();
    wgmma_wait<0>();
    wgmma_hold(sums);
    leave_sums<C>(shared, group, false, sums);
  }
};

template <class C>
SCALEDOT_DEVICE void consume_wide(const Problem& p, const BackwardPlan90& plan, BackwardShared90<C>& shared,
                                  int group) {
  WideConsumer<C> consumer = {p, plan, shared, group, {}, {}};
#pragma unroll
  for (int k = 0; k < C::kShare / 2; ++k) consumer.grad_key[k] = consumer.grad_value[k] = 0;
  mbarrier_wait(&shared.loaded, 0);
  for_each_band<C>(p, shared, [&](const BackwardStep& step, const Band& band, bool masks) {
    if (masks)
      consumer.template tile<true>(step, band);
    else
      consumer.template tile<false>(step, band);
  });
  const KeyLane lane = key_lane<C>(group);
  const BackwardTask task = shared_load(&shared.task);
  const int first_col = group * C::kShare;
  store_gradient<C>(p, p.grad_key, task, lane, first_col, p.head_dim, float(p.scale), consumer.grad_key);
  store_gradient<C>(p, p.grad_value, task, lane, first_col, p.value_dim, 1, consumer.grad_value);
}

}  // namespace
}  // namespace scaledot
