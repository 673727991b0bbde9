// What the consumers of the backward have in common, however they share the work: S^T and dP^T from the tiles, and the
// way out for sums.
#pragma once

#include "cuda/sm90/backward_scores.cuh"
#include "cuda/sm90/backward_steps.cuh"

namespace scaledot {
namespace {

// d = A B^T, for 64 rows of A and 2 kCount rows of B, in panels of `a_rows` and kRows rows.
template <class C, int kCount>
SCALEDOT_DEVICE void multiply_panels(float (&d)[kCount], const typename C::Storage* a, int a_rows,
                                     const typename C::Storage* b) {
  const uint64_t of_a = operand_k(a), of_b = operand_k(b);
#pragma unroll
  for (int k = 0; k < C::kDim / 16; ++k) {
    const int panel = k / 4, bytes = k % 4 * 32;
    wgmma<2 * kCount, Major::k, Major::k>(d, operand_at(of_a, panel * a_rows * 128 + bytes),
                                          operand_at(of_b, panel * C::kRows * 128 + bytes), k > 0,
                                          Type<typename C::Storage>{});
  }
}

// S^T = K Q^T and dP^T = V dO^T of a warpgroup's scores, started: a group each.
template <class C>
SCALEDOT_DEVICE void start_scores(BackwardShared90<C>& shared, const BackwardStep& step, const KeyLane& lane,
                                  float (&s)[C::kScores], float (&dp)[C::kScores]) {
  const Ring<C::kQueryStages> queries = {step.number};
  const Ring<C::kGradStages> grads = {step.number};
  const int keys = lane.first_key * kPanelCols, rows = lane.first_row * kPanelCols;
  mbarrier_wait(&shared.query_full[queries.stage()], queries.phase());
  wgmma_fence();
  multiply_panels<C>(s, shared.key + keys, C::kKeys, shared.query[queries.stage()] + rows);
  wgmma_commit();
  mbarrier_wait(&shared.grad_full[grads.stage()], grads.phase());
  wgmma_fence();
  multiply_panels<C>(dp, shared.value + keys, C::kKeys, shared.grad_output[grads.stage()] + rows);
  wgmma_commit();
}

// Which of a warpgroup's weights dropout keeps, drawn by its threads; nullptr where nothing is dropped.
template <class C>
SCALEDOT_DEVICE const uint8_t* kept_weights(const Problem& p, BackwardShared90<C>& shared, const BackwardStep& step,
                                            int group) {
  if (!C::kGeneral || p.dropout_p == 0) return nullptr;
  const KeyLane lane = key_lane<C>(group);
  draw_dropout<C>(p, shared.kept[group], lane.first_row, shared_load(&shared.task.batch), step.head,
                  step.row_tile * C::kRows, shared_load(&shared.task.tile) * int64_t(C::kKeys) + lane.first_key);
  named_barrier_wait(kOneConsumer + group, kWarpgroupThreads);
  return shared.kept[group];
}

// A stage whose products are done: the loading warp may fill it again.
SCALEDOT_DEVICE void release(uint64_t* empty) {
  warp_barrier();
  if (lane_index() == 0) mbarrier_arrive(empty);
}

// Calls body(step, band, masks) for each tile of rows. masks: some of its scores are masked.
template <class C, class Body>
SCALEDOT_DEVICE void for_each_band(const Problem& p, BackwardShared90<C>& shared, const Body& body) {
  for_each_step(shared.task, [&](const BackwardStep& step) {
    const int row = step.row_tile * C::kRows;
    const Band band = band_of_rows(shared_load(&shared.task.band), row, min(int(p.query_length) - row, C::kRows));
    bool masks = !band_is_whole(band, C::kKeys);
    if constexpr (C::kGeneral) masks |= !positions_are_a_band(p) || p.attn_mask.data;
    body(step, band, masks);
  });
}

// A warpgroup's 64 keys of grad_key or grad_value, from column first_col on: `factor` times the sums.
template <class C, int kCount>
SCALEDOT_DEVICE void store_gradient(const Problem& p, const TensorView& view, const BackwardTask& task,
                                    const KeyLane& lane, int first_col, int64_t cols, float factor,
                                    const float (&sums)[kCount]) {
  using Storage = typename C::Storage;
  if (!view.data) return;
  const Range keys = backward_keys(p, task.tile, C::kKeys);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t key = keys.begin + lane.key(half);
    if (key >= keys.end) continue;
    Storage* to = at<Storage>(p, view, task.batch, task.kv_head) + key * view.row_stride;
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int col = first_col + 8 * n + 2 * lane.quad + j;
        if (col >= cols) continue;
        Storage x;
        narrow(sums[4 * n + 2 * half + j] * factor, x);
        global_store(to + col * view.col_stride, x);
      }
  }
}

}  // namespace
}  // namespace scaledot
