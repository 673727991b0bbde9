// What the backward for sm_90 has to know before it begins: of every row its lse and delta (made by the generic kernels) in tiles that
// the copy engine can load, sums and turns set to 0, and whether any number is not finite.
#pragma once

#include "cuda/generic/backward.cuh"
#include "cuda/ptx/turn.h"
#include "cuda/sm90/backward_config.h"

namespace scaledot {
namespace {

struct BackwardPlan90 {
  BackwardPlan<float> rows;      // delta and shift
  int64_t row_tiles, key_tiles;  // of a (batch, head) plane
  RowTerms* terms;               // (plane, padded row)
  RowPosition* positions;        // the same, for the general kernel
  float* grad_query;             // (plane, tile of rows, warpgroup, part): sums; backward_sum_place
  int* turns;                    // (plane, tile of rows, part): the tile of keys that is to add to grad_query
  int* row_ranges;               // (tile of keys): first and last tile of rows that attend to it
  int* ticket;                   // blocks that have begun
  int* wild;                     // whether query, key or grad_output have NaN or inf; nullptr if no score is masked
};

// Whether all is left to the generic kernels.
SCALEDOT_DEVICE bool is_wild(const BackwardPlan90& plan) { return plan.wild && global_load(plan.wild) != 0; }

constexpr int kRowThreads = 256;
constexpr float kLog2E = 1.4426950408889634f;

// A thread a row, those that pad the last tile included.
template <class C>
SCALEDOT_KERNEL(kRowThreads)
pack_rows_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM BackwardPlan90 plan) {
  const int64_t padded = plan.row_tiles * C::kRows, planes = p.batch * p.heads;
  const int64_t first = block_index() * kRowThreads + thread_index(), step = block_count() * kRowThreads;
  for (int64_t r = first; r < planes * padded; r += step) {
    const int64_t plane = r / padded, i = r % padded, batch = plane / p.heads, head = plane % p.heads;
    RowTerms terms = {__builtin_inff(), 0, 0, 0};
    RowPosition position = {};
    if (i < p.query_length) {
      const RowShift<float> shift = global_load(plan.rows.shift + plane * p.query_length + i);
      terms = {(shift.offset + shift.log_sum) * kLog2E, global_load(plan.rows.delta + plane * p.query_length + i),
               shift.offset, shift.log_sum};
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
    global_store(plan.terms + r, terms);
    if constexpr (C::kGeneral) global_store(plan.positions + r, position);
  }
  if (plan.grad_query) {
    using Four = Few<float, 4>;
    for (int64_t k = first; k < planes * padded * C::kDim / 4; k += step)
      global_store(reinterpret_cast<Four*>(plan.grad_query) + k, Four{});
  }
  for (int64_t k = first; k < planes * plan.row_tiles * C::kParts; k += step)
    global_store(plan.turns + k, int(backward_first_keys(p, k / C::kParts % plan.row_tiles, C::kKeys)));
  for (int64_t k = first; k < plan.key_tiles; k += step) {
    const Range rows = backward_row_tiles(p, backward_keys(p, k, C::kKeys));
    global_store(plan.row_ranges + 2 * k, int(rows.begin));
    global_store(plan.row_ranges + 2 * k + 1, int(rows.end));
  }
  if (first == 0) {
    global_store(plan.ticket, 0);
    if (plan.wild) global_store(plan.wild, 0);
  }
}

// Looks for NaN and inf. A block a tile: of rows of grad_output and query first, then of keys.
template <class C>
SCALEDOT_KERNEL(kRowThreads)
find_wild_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM BackwardPlan90 plan) {
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
        const auto chunk = global_load(reinterpret_cast<const Few<Storage, kChunk>*>(from));
#pragma unroll
        for (int e = 0; e < kChunk; ++e) check(chunk.x[e]);
      } else {
        for (int e = 0; e < cols - col; ++e) check(global_load(from + e));
      }
    }
  };
  const int64_t of_rows = p.batch * p.heads * plan.row_tiles;
  if (block_index() < of_rows) {
    const int64_t plane = block_index() / plan.row_tiles, batch = plane / p.heads, head = plane % p.heads;
    const Range rows = backward_rows(p, block_index() % plan.row_tiles);
    look(p.grad_output, batch, head, rows, p.value_dim);
    look(p.query, batch, head, rows, p.head_dim);
  } else {
    const int64_t index = block_index() - of_rows, plane = index / plan.key_tiles;
    look(p.key, plane / p.kv_heads, plane % p.kv_heads, backward_keys(p, index % plan.key_tiles, C::kKeys), p.head_dim);
  }
  if (found) global_store(plan.wild, 1);
}

// grad_query = scale times the sums. A thread four sums.
template <class C>
SCALEDOT_KERNEL(kRowThreads)
store_grad_query_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM BackwardPlan90 plan) {
  using Storage = typename C::Storage;
  if (is_wild(plan)) return;
  constexpr int kPerShare = C::kRows * C::kShare / 4;
  const int64_t count = p.batch * p.heads * plan.row_tiles * C::kConsumers * kPerShare;
  for (int64_t k = block_index() * kRowThreads + thread_index(); k < count; k += block_count() * kRowThreads) {
    const int64_t share = k / kPerShare, tile = share / C::kConsumers, plane = tile / plan.row_tiles;
    const int within = int(k % kPerShare), thread = within % 128, group = within / 128;
    const Few<float, 4> sums = global_load(reinterpret_cast<const Few<float, 4>*>(plan.grad_query) + k);
    Storage* to = at<Storage>(p, p.grad_query, plane / p.heads, plane % p.heads);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const SumPlace place = backward_sum_place(thread, group, e);
      const int64_t row = tile % plan.row_tiles * C::kRows + place.row;
      const int64_t col = share % C::kConsumers * C::kShare + place.col;
      if (row >= p.query_length || col >= p.head_dim) continue;
      Storage x;
      narrow(sums.x[e] * float(p.scale), x);
      global_store(to + row * p.grad_query.row_stride + col * p.grad_query.col_stride, x);
    }
  }
}

}  // namespace
}  // namespace scaledot
