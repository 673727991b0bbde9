// Small kernels that prepare the backward for sm_90: each row's lse and delta (from the generic kernels) in tiles that
// the copy engine can load, sums and counters set to their first values, and whether there are non-finite elements.
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
    if (plan.nonfinite) global_store(plan.nonfinite, 0);
  }
}

// Looks for NaN and inf, one block a tile: first the row tiles of grad_output and query, then the key tiles.
template <class C>
SCALEDOT_KERNEL(kRowThreads)
sm90_find_nonfinite_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM Sm90BackwardPlan plan) {
  using Storage = typename C::Storage;
  constexpr int kChunk = 16 / int(sizeof(Storage));
  bool found = false;
  const auto look = [&](const TensorView& view, int64_t batch, int64_t head, Range rows, int64_t cols) {
    const Storage* data = at<const Storage>(p, view, batch, head);
    const int64_t chunks = ceil_div(cols, kChunk);
    for (int64_t k = thread_index(); k < count(rows) * chunks; k += kRowThreads) {
      const int64_t col = k % chunks * kChunk;
      const Storage* from = data + (rows.begin + k / chunks) * view.row_stride + col;
      const auto check = [&](Storage number) {
        const float x = widen(number);
        found |= !(x - x == 0);
      };
      if (col + kChunk <= cols) {
        const auto chunk = global_load(reinterpret_cast<const AlignedVector<Storage, kChunk>*>(from));
#pragma unroll
        for (int e = 0; e < kChunk; ++e) check(chunk.x[e]);
      } else {
        for (int e = 0; e < cols - col; ++e) check(global_load(from + e));
      }
    }
  };
  const int64_t of_rows = p.batch * p.heads * plan.row_tiles;
  if (block_index() < of_rows) {
    const int64_t batch_head = block_index() / plan.row_tiles;
    const int64_t batch = batch_head / p.heads, head = batch_head % p.heads;
    const Range rows = backward_rows(p, block_index() % plan.row_tiles, C::kRows);
    look(p.grad_output, batch, head, rows, p.value_dim);
    look(p.query, batch, head, rows, p.head_dim);
  } else {
    const int64_t index = block_index() - of_rows, batch_kv_head = index / plan.key_tiles;
    const Range keys = backward_keys(p, index % plan.key_tiles, C::kKeys);
    look(p.key, batch_kv_head / p.kv_heads, batch_kv_head % p.kv_heads, keys, p.head_dim);
  }
  if (found) global_store(plan.nonfinite, 1);
}

}  // namespace
}  // namespace scaledot
