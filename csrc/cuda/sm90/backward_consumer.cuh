// Code that both kinds of consumers of the backward share: the loop over row tiles, S^T and dP^T, and the stores of
// grad_key and grad_value.
#pragma once

#include "cuda/sm90/backward_grad_query.cuh"
#include "cuda/sm90/backward_scores.cuh"
#include "cuda/sm90/backward_tasks.cuh"
#include "cuda/store_rows.cuh"

namespace scaledot {
namespace {

// Issues d = A B^T, for 64 rows of A and 2 kCount rows of B, which have kCols columns. Their panels have a_rows and
// kRows rows.
template <class C, int kCols, int kCount>
SCALEDOT_DEVICE void issue_product(float (&d)[kCount], const typename C::Storage* a, int a_rows,
                                   const typename C::Storage* b) {
  const uint64_t of_a = k_major_descriptor(a), of_b = k_major_descriptor(b);
#pragma unroll
  for (int k = 0; k < kCols / 16; ++k) {
    const int panel = k / 4, bytes = k % 4 * 32;
    wgmma<2 * kCount, Major::k, Major::k>(d, advance_descriptor(of_a, panel * a_rows * 128 + bytes),
                                          advance_descriptor(of_b, panel * C::kRows * 128 + bytes), k > 0,
                                          Type<typename C::Storage>{});
  }
}

// Issues S^T = K Q^T of a warpgroup's scores in step number `step`, as one wgmma group.
template <class C>
SCALEDOT_DEVICE void issue_scores(Sm90BackwardShared<C>& shared, uint32_t step, const Sm90BackwardLayout& layout,
                                  float (&s)[C::kScores]) {
  const Ring<C::kQueryStages> queries = {step};
  mbarrier_wait(&shared.query_full[queries.stage()], queries.phase());
  wgmma_fence();
  issue_product<C, C::kDim>(s, shared.key + layout.first_key * kPanelCols, C::kKeys,
                            shared.query[queries.stage()] + layout.first_row * kPanelCols);
  wgmma_commit();
}
// Issues dP^T = V dO^T of the same scores.
template <class C>
SCALEDOT_DEVICE void issue_weight_gradients(Sm90BackwardShared<C>& shared, uint32_t step,
                                            const Sm90BackwardLayout& layout, float (&dp)[C::kScores]) {
  const Ring<C::kGradStages> grads = {step};
  mbarrier_wait(&shared.grad_full[grads.stage()], grads.phase());
  wgmma_fence();
  issue_product<C, C::kValueDim>(dp, shared.value + layout.first_key * kPanelCols, C::kKeys,
                                 shared.grad_output[grads.stage()] + layout.first_row * kPanelCols);
  wgmma_commit();
}

// Draws which of a warpgroup's weights dropout keeps; nullptr if nothing is dropped.
template <class C>
SCALEDOT_DEVICE const uint8_t* draw_keep_mask(const Problem& p, Sm90BackwardShared<C>& shared,
                                              const Sm90BackwardStep& step, int group, int row_part = 0) {
  if (!C::kGeneral || p.dropout_p == 0) return nullptr;
  const Sm90BackwardLayout layout = backward_layout<C>(group, row_part);
  draw_dropout<C>(p, shared.keep_mask[group], layout.first_row, shared_load(&shared.task.batch), step.head,
                  step.row_tile * C::kRows, shared_load(&shared.task.tile) * int64_t(C::kKeys) + layout.first_key);
  named_barrier_wait(kOneConsumer + group, kWarpgroupThreads);
  return shared.keep_mask[group];
}

// Releases a stage whose products are done: the producer may fill it again.
SCALEDOT_DEVICE void release_stage(uint64_t* empty) {
  warp_barrier();
  if (lane_index() == 0) mbarrier_arrive(empty);
}

// A consumer's step, and which of its scores are live.
struct Sm90ConsumerStep {
  Sm90BackwardStep step;
  LiveBand band;
  bool masks;  // some scores may be masked
};

// Fills in band and masks.
template <class C>
SCALEDOT_DEVICE void find_live_scores(const Problem& p, const Sm90BackwardTask& task, Sm90ConsumerStep& of) {
  const int row = of.step.row_tile * C::kRows;
  of.band = band_of_rows(shared_load(&task.band), row, min(int(p.query_length) - row, C::kRows));
  of.masks = !band_is_whole(of.band, C::kRows, C::kKeys);
  if constexpr (C::kGeneral) of.masks |= p.attn_mask.data != nullptr;
}

// All steps by a consumer. run_step calls look_ahead(), which finds out about the next step, before it waits for its
// last products, so that the next ones follow at once.
template <class C, class Consumer>
SCALEDOT_DEVICE void run_steps(Consumer& consumer) {
  const Problem& p = consumer.p;
  const Sm90BackwardTask& task = consumer.shared.task;
  if (!has_steps(task)) return;
  Sm90ConsumerStep next = {first_step(task), {}, false};
  find_live_scores<C>(p, task, next);
  bool more = true;
  const auto look_ahead = [&] {
    more = next_step(task, next.step);
    find_live_scores<C>(p, task, next);
    return more;
  };
  consumer.begin();
#pragma unroll 1
  do {
    const Sm90ConsumerStep now = next;
    if (now.masks)
      consumer.template run_step<true>(now.step, now.band, look_ahead);
    else
      consumer.template run_step<false>(now.step, now.band, look_ahead);
  } while (more);
}

// Stores a warpgroup's 64 keys of grad_key or grad_value, from column first_col on: `factor` times the sums.
template <class C, int kCount>
SCALEDOT_DEVICE void store_gradient(const Problem& p, int* has_nan, const TensorView& view,
                                    const Sm90BackwardTask& task, const Sm90BackwardLayout& layout, int first_col,
                                    int64_t cols, float factor, const float (&sums)[kCount]) {
  using Storage = typename C::Storage;
  if (!view.data) return;
  const Range keys = backward_keys(p, task.tile, C::kKeys);
  const RowPair<Storage> rows = row_pair(view, cols, element_ptr<Storage>(p, view, task.batch, task.kv_head),
                                         keys.begin + layout.key(0), keys.end);
  bool nan = false;
  store_row_pair<kCount / 4>(rows, first_col, [&](int n, int half) {
    const float* of = sums + 4 * n + 2 * half;
    nan |= rows.to[half] && first_col + 8 * n < cols && (of[0] != of[0] || of[1] != of[1]);
    // Without the barriers, the conversion moves into the loop over steps, whose registers are in use.
    return narrow_pair(opt_barrier(of[0] * factor), opt_barrier(of[1] * factor), Type<Storage>{});
  });
  if (has_nan && nan) global_store(has_nan, 1);
}

// All steps of a task by one warpgroup, then its gradients. Consumer: Sm90NarrowConsumer or Sm90WideConsumer.
template <class C, class Consumer>
SCALEDOT_DEVICE void consume_backward(Consumer& consumer) {
  const Problem& p = consumer.p;
#pragma unroll
  for (float& x : consumer.grad_key) x = 0;
#pragma unroll
  for (float& x : consumer.grad_value) x = 0;
  mbarrier_wait(&consumer.shared.loaded, 0);
  run_steps<C>(consumer);
  const Sm90BackwardLayout layout = backward_layout<C>(consumer.group);
  const Sm90BackwardTask task = shared_load(&consumer.shared.task);
  int* has_nan = consumer.plan.has_nan;
  store_gradient<C>(p, has_nan, p.grad_key, task, layout, consumer.first_col(consumer.grad_key), p.head_dim,
                    float(p.scale), consumer.grad_key);
  store_gradient<C>(p, has_nan, p.grad_value, task, layout, consumer.first_col(consumer.grad_value), p.value_dim, 1,
                    consumer.grad_value);
}

}  // namespace
}  // namespace scaledot
