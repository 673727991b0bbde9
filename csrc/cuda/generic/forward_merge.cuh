// The last kernel of a forward whose keys were split: merges the partial results of one tile and panel, in order.
//
//   m = max m_k      w_k = exp(m_k - m)      O = sum w_k O_k / sum w_k l_k
#pragma once

#include "cuda/generic/forward_plan.cuh"
#include "cuda/generic/scores.cuh"

namespace scaledot {
namespace {

constexpr int kMergeThreads = 128;

template <class C>
SCALEDOT_KERNEL(kMergeThreads)
merge_kernel(SCALEDOT_PARAM Problem given, SCALEDOT_PARAM GenericForwardPlan<typename C::T> plan) {
  using Storage = typename C::Storage;
  using T = typename C::T;
  QueryTask task = query_task(block_index(), plan.tiling, plan.panels, 1);
  const Problem& p = problem_of_block<C, kMergeThreads>(given, task.kv_group, shared_memory());
  const StackedTile tile = query_tile(p, plan.tiling, task.kv_group, task.tile);
  if (is_empty<C>(tile)) return;
  const T inverse_keep = T(dropout_scale(p));
  for (int k = thread_index(); k < tile_rows(tile) * C::kPanel; k += kMergeThreads) {
    const int r = k / C::kPanel, within = k % C::kPanel;
    const int64_t col = int64_t(task.panel) * C::kPanel + within;
    RowState<T> total = empty_row<T>();
    T out = T(0);
    for (int64_t split = 0; split < plan.splits; ++split) {
      const int64_t partial = (block_index() * plan.splits + split) * C::kSide + r;
      const RowState<T> state = global_load(plan.partial_states + partial);
      if (state.sum == T(0)) continue;
      const T maximum = max(total.maximum, state.maximum);
      const T before = total.sum == T(0) ? T(0) : exp(total.maximum - maximum);
      const T factor = state.maximum == maximum ? T(1) : exp(state.maximum - maximum);
      total = {maximum, total.sum * before + state.sum * factor};
      out = out * before + global_load(plan.partials + partial * C::kPanel + within) * factor;
    }
    const ThreadRow<T> row = thread_row<T>(p, tile, r, {0, 0});
    if (col < p.value_dim) {
      T exact;
      if constexpr (C::kQuantised)
        exact = out * output_factor_of<C>(p, tile, total, inverse_keep);
      else
        exact = out * normaliser(total) * inverse_keep;
      Storage x;
      narrow(exact, x);
      global_store(element_ptr<Storage>(p, p.output, tile.batch, row.head) + row.i * p.output.row_stride +
                       col * p.output.col_stride,
                   x);
      if constexpr (kSavesOutputLow<C>)
        if (p.output_low.data)
          global_store(
              element_ptr<Storage>(p, p.output_low, tile.batch, row.head) + row.i * p.output_low.row_stride + col,
              output_low_of(exact, x));
    }
    if (col != 0) continue;
    if (p.lse.data)
      global_store(element_ptr<T>(p, p.lse, tile.batch, row.head) + row.i * p.lse.row_stride, logsumexp(total));
    if (plan.states) global_store(plan.states + row_number(p, tile, row), total);
  }
}

}  // namespace
}  // namespace scaledot
