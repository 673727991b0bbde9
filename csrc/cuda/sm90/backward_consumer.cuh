// What both kinds of consumers of the backward share: the loop over row tiles, S^T and dP^T, and the stores of grad_key
// and grad_value.
#pragma once

#include "cuda/sm90/backward_grad_query.cuh"
#include "cuda/sm90/backward_scores.cuh"
#include "cuda/sm90/backward_tasks.cuh"

namespace scaledot {
namespace {

// Issues d = A B^T, for 64 rows of A and 2 kCount rows of B. Their panels have a_rows and kRows rows.
template <class C, int kCount>
SCALEDOT_DEVICE void issue_product(float (&d)[kCount], const typename C::Storage* a, int a_rows,
                                   const typename C::Storage* b) {
  const uint64_t of_a = k_major_descriptor(a), of_b = k_major_descriptor(b);
#pragma unroll
  for (int k = 0; k < C::kDim / 16; ++k) {
    const int panel = k / 4, bytes = k % 4 * 32;
    wgmma<2 * kCount, Major::k, Major::k>(d, advance_descriptor(of_a, panel * a_rows * 128 + bytes),
                                          advance_descriptor(of_b, panel * C::kRows * 128 + bytes), k > 0,
                                          Type<typename C::Storage>{});
  }
}

// Issues S^T = K Q^T and dP^T = V dO^T of a warpgroup's scores, as one wgmma group each.
template <class C>
SCALEDOT_DEVICE void issue_scores(Sm90BackwardShared<C>& shared, const Sm90BackwardStep& step,
                                  const Sm90BackwardLayout& layout, float (&s)[C::kScores], float (&dp)[C::kScores]) {
  const Ring<C::kQueryStages> queries = {step.number};
  const Ring<C::kGradStages> grads = {step.number};
  const int keys = layout.first_key * kPanelCols, rows = layout.first_row * kPanelCols;
  mbarrier_wait(&shared.query_full[queries.stage()], queries.phase());
  wgmma_fence();
  issue_product<C>(s, shared.key + keys, C::kKeys, shared.query[queries.stage()] + rows);
  wgmma_commit();
  mbarrier_wait(&shared.grad_full[grads.stage()], grads.phase());
  wgmma_fence();
  issue_product<C>(dp, shared.value + keys, C::kKeys, shared.grad_output[grads.stage()] + rows);
  wgmma_commit();
}

// Draws which of a warpgroup's weights dropout keeps; nullptr if nothing is dropped.
template <class C>
SCALEDOT_DEVICE const uint8_t* draw_kept_weights(const Problem& p, Sm90BackwardShared<C>& shared,
                                                 const Sm90BackwardStep& step, int group) {
  if (!C::kGeneral || p.dropout_p == 0) return nullptr;
  const Sm90BackwardLayout layout = backward_layout<C>(group);
  draw_dropout<C>(p, shared.kept[group], layout.first_row, shared_load(&shared.task.batch), step.head,
                  step.row_tile * C::kRows, shared_load(&shared.task.tile) * int64_t(C::kKeys) + layout.first_key);
  named_barrier_wait(kOneConsumer + group, kWarpgroupThreads);
  return shared.kept[group];
}

// Releases a stage whose products are done: the producer may fill it again.
SCALEDOT_DEVICE void release_stage(uint64_t* empty) {
  warp_barrier();
  if (lane_index() == 0) mbarrier_arrive(empty);
}

// Calls body(step, band, masks) for each tile of rows. masks: some of its scores may be masked.
template <class C, class Body>
SCALEDOT_DEVICE void for_each_row_tile(const Problem& p, Sm90BackwardShared<C>& shared, const Body& body) {
  for_each_step(shared.task, [&](const Sm90BackwardStep& step) {
    const int row = step.row_tile * C::kRows;
    const LiveBand band = band_of_rows(shared_load(&shared.task.band), row, min(int(p.query_length) - row, C::kRows));
    bool masks = !band_is_whole(band, C::kKeys);
    if constexpr (C::kGeneral) masks |= !positions_are_a_band(p) || p.attn_mask.data;
    body(step, band, masks);
  });
}

// Stores a warpgroup's 64 keys of grad_key or grad_value, from column first_col on: `factor` times the sums.
template <class C, int kCount>
SCALEDOT_DEVICE void store_gradient(const Problem& p, const TensorView& view, const Sm90BackwardTask& task,
                                    const Sm90BackwardLayout& layout, int first_col, int64_t cols, float factor,
                                    const float (&sums)[kCount]) {
  using Storage = typename C::Storage;
  if (!view.data) return;
  const Range keys = backward_keys(p, task.tile, C::kKeys);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t key = keys.begin + layout.key(half);
    if (key >= keys.end) continue;
    Storage* to = at<Storage>(p, view, task.batch, task.kv_head) + key * view.row_stride;
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int col = first_col + 8 * n + 2 * layout.quad + j;
        if (col >= cols) continue;
        Storage x;
        narrow(sums[4 * n + 2 * half + j] * factor, x);
        global_store(to + col * view.col_stride, x);
      }
  }
}

// All steps of a task by one warpgroup, then its gradients. Consumer: Sm90NarrowConsumer or Sm90WideConsumer.
template <class C, class Consumer>
SCALEDOT_DEVICE void consume_backward(Consumer& consumer) {
  const Problem& p = consumer.p;
#pragma unroll
  for (int k = 0; k < Consumer::kCols / 2; ++k) consumer.grad_key[k] = consumer.grad_value[k] = 0;
  mbarrier_wait(&consumer.shared.loaded, 0);
  for_each_row_tile<C>(p, consumer.shared, [&](const Sm90BackwardStep& step, const LiveBand& band, bool masks) {
    if (masks)
      consumer.template run_step<true>(step, band);
    else
      consumer.template run_step<false>(step, band);
  });
  const Sm90BackwardLayout layout = backward_layout<C>(consumer.group);
  const Sm90BackwardTask task = shared_load(&consumer.shared.task);
  const int first_col = consumer.first_col();
  store_gradient<C>(p, p.grad_key, task, layout, first_col, p.head_dim, float(p.scale), consumer.grad_key);
  store_gradient<C>(p, p.grad_value, task, layout, first_col, p.value_dim, 1, consumer.grad_value);
}

}  // namespace
}  // namespace scaledot
