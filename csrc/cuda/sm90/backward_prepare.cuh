// A small kernel that prepares the backward for sm_90: each row's lse and delta (from the generic kernels) in tiles
// that the copy engine can load, and sums and counters set to their first values.
#pragma once

#include "cuda/sm90/backward_plan.cuh"

namespace scaledot {
namespace {

constexpr int kRowThreads = 256;

// One thread a row, including the rows that pad the last tile. Also initialises sums and counters.
template <class C>
SCALEDOT_KERNEL(kRowThreads)
sm90_pack_rows_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM Sm90BackwardPlan plan) {
  const int64_t padded = plan.row_tiles * C::kRows, batch_heads = p.batch * p.heads;
  const int64_t first = block_index() * kRowThreads + thread_index(), step = block_count() * kRowThreads;
  for (int64_t r = first; r < batch_heads * padded; r += step) {
    const int64_t batch_head = r / padded, i = r % padded, batch = batch_head / p.heads, head = batch_head % p.heads;
    SplitLse<float> lse = {__builtin_inff(), 0};
    float delta = 0;
    Sm90RowPosition position = {};
    if (i < p.query_length) {
      const int64_t row = batch_head * p.query_length + i;
      lse = global_load(plan.rows.lse + row), delta = global_load(plan.rows.delta + row);
      if constexpr (C::kGeneral) {
        const RowMask<float> mask = row_mask<float>(p, batch, head, i);
        const Range live = intersect({mask.live.begin, mask.live.end}, {0, p.key_length});
        position = {int32_t(min(live.begin, p.key_length)),
                    int32_t(max<int64_t>(live.end, 0)),
                    int32_t(mask.aligned),
                    mask.slope,
                    mask.start,
                    p.grad_mask.data ? offset(p, p.grad_mask, batch, head) + i * p.grad_mask.row_stride : 0};
      }
    }
    auto& tile = static_cast<typename C::Statistics*>(plan.statistics)[r / C::kRows];
    if constexpr (C::kGeneral) {
      global_store(&tile.row[r % C::kRows], Sm90RowStatistics{delta, lse.offset, lse.log_sum});
      global_store(plan.positions + r, position);
    } else {
      const int place = statistics_place(int(r % C::kRows));
      global_store(&tile.lse2[place], (lse.offset + lse.log_sum) * float(kLog2e));
      global_store(&tile.delta[place], delta);
    }
  }
  if (plan.grad_query) {
    using Four = AlignedVector<float, 4>;
    for (int64_t k = first; k < batch_heads * padded * C::kDim / 4; k += step)
      global_store(reinterpret_cast<Four*>(plan.grad_query) + k, Four{});
  }
  for (int64_t k = first; k < batch_heads * plan.row_tiles * C::kGradQueryParts; k += step)
    global_store(plan.semaphores + k,
                 backward_first_turn(p, backward_rows(p, k / C::kGradQueryParts % plan.row_tiles, C::kRows), C::kKeys));
  for (int64_t k = first; k < plan.key_tiles; k += step) {
    const Range rows = backward_row_tiles(p, backward_keys(p, k, C::kKeys), C::kRows);
    global_store(plan.row_ranges + 2 * k, int(rows.begin));
    global_store(plan.row_ranges + 2 * k + 1, int(rows.end));
  }
  if (first == 0) {
    global_store(plan.ticket, 0);
    if (plan.has_nan) global_store(plan.has_nan, 0);
  }
}

}  // namespace
}  // namespace scaledot
