// The end of a query tile in the forward: a warpgroup's 64 rows from registers to memory.
#pragma once

#include "cuda/ptx/stmatrix.h"
#include "cuda/sm90/forward_packed.cuh"
#include "cuda/store_rows.cuh"

namespace scaledot {
namespace {

// Returns output_low_of (core/number.h) of two numbers: what rounding takes off them, rounded too, or 0 if not finite.
template <class Storage>
SCALEDOT_DEVICE uint32_t low_pair(float first, float second) {
  float low[2];
  widen_pair(narrow_pair(first, second, Type<Storage>{}), low[0], low[1], Type<Storage>{});
  low[0] = first - low[0], low[1] = second - low[1];
#pragma unroll
  for (float& x : low) x = x - x == 0 ? x : 0;
  return narrow_pair(low[0], low[1], Type<Storage>{});
}

// Stores the low part of the output (core/saved.h).
template <class C>
SCALEDOT_DEVICE void store_output_low(const Problem& p, const Sm90ThreadRows<C>& rows, const float (&factor)[2],
                                      const float (&out)[C::kValueDim / 2]) {
  using Storage = typename C::Storage;
  const int batch_head = rows.batch_head;
  Storage* to = element_ptr<Storage>(p, p.output_low, batch_head / int(p.heads), batch_head % int(p.heads));
  store_row_pair<C::kValueDim / 8>(row_pair(p.output_low, p.value_dim, to, rows.first, p.query_length), 0,
                                   [&](int n, int half) {
                                     const float* of = out + 4 * n + 2 * half;
                                     return low_pair<Storage>(of[0] * factor[half], of[1] * factor[half]);
                                   });
}

// Stores lse, and writes the output to shared memory.
template <class C>
SCALEDOT_DEVICE void store_rows(const Problem& p, const Sm90ForwardPlan& plan, const Sm90ThreadRows<C>& rows,
                                const OnlineSoftmax<C>& online, float value_scale, Sm90OutputTile<C>& buffer,
                                float (&out)[C::kValueDim / 2]) {
  const FragmentOrigin origin = fragment_origin();
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const RowState<float> state = reduce_row(plan.scalars, online, half);
    factor[half] = C::kQuantised ? output_factor(state, value_scale)  // which may be NaN: an empty row gives 0
                                 : normaliser(state) * plan.scalars.dropout_scale;
    const int i = rows.first + 8 * half, batch_head = rows.batch_head;
    if (i >= p.query_length || origin.col != 0) continue;
    if (p.lse.data)
      global_store(
          element_ptr<float>(p, p.lse, batch_head / int(p.heads), batch_head % int(p.heads)) + i * p.lse.row_stride,
          logsumexp(state));
    if (plan.states) global_store(plan.states + batch_head * p.query_length + i, state);
  }
  if (p.output_low.data) store_output_low<C>(p, rows, factor, out);
  // stmatrix: lane l passes the address of row l % 8 of the 8 x 8 matrix l / 8. Matrices 0 and 1 are the left columns
  // of each 16 x 16 block, 2 and 3 the right ones.
  const int thread = opt_barrier(thread_index() % kWarpgroupThreads), lane = thread % kWarpSize;
  const int row = thread / kWarpSize * 16 + lane % 16;
  char* data = reinterpret_cast<char*>(buffer.data) + row * kSwizzleCols * 2;
  const int swizzled = swizzled_byte(row % 8, lane / 16 * 16) - row % 8 * kSwizzleCols * 2;
#pragma unroll
  for (int n = 0; n < C::kValueDim / 8; n += 2) {
    uint32_t r[4];
#pragma unroll
    for (int m = 0; m < 4; ++m)
      r[m] = narrow_pair(out[4 * n + 2 * m] * factor[m % 2], out[4 * n + 2 * m + 1] * factor[m % 2],
                         Type<typename C::Storage>{});
    stmatrix_x4(data + n / 8 * buffer.kPanelBytes + (swizzled ^ (n % 8 * 16)), r);
  }
}

// One thread of the warpgroup, the first, starts to store the output in `buffer` by TMA. `first_row`: of the calling
// thread, and thus, for the first, of the warpgroup. `first_of_all`: the row of the output where the rows of `p` begin.
template <class C>
SCALEDOT_DEVICE void store_output_tile(const Problem& p, const Sm90ForwardPlan& plan, int batch_head, int first_row,
                                       int first_of_all, const Sm90OutputTile<C>& buffer) {
  if (opt_barrier(thread_index()) % kWarpgroupThreads != 0 || first_row >= p.query_length) return;
#pragma unroll
  for (int k = 0; k < C::kValueDim / kPanelCols; ++k)
    if (k * kPanelCols < p.value_dim)
      tensor_store(plan.output.map, reinterpret_cast<const char*>(buffer.data) + k * buffer.kPanelBytes, k * kPanelCols,
                   first_of_all + first_row, batch_head % int(p.heads) * plan.output.head_step,
                   batch_head / int(p.heads) * plan.output.batch_step);
  bulk_commit();
}

}  // namespace
}  // namespace scaledot
