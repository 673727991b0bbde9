// The last kernel of a forward whose keys were split: merges the partial results of the splits. A block merges some
// rows of one tile and panel, one after the other, and its warps divide the splits.
//
//   m = max m_k      w_k = exp(m_k - m)      O = sum w_k O_k / sum w_k l_k
#pragma once

#include "cuda/generic/forward_plan.cuh"
#include "cuda/generic/scores.cuh"

namespace scaledot {
namespace {

constexpr int kMergeWarps = 8, kMergeThreads = kMergeWarps * kWarpSize;

template <class C>
struct alignas(16) MergeShared {
  typename C::T out[kMergeWarps * C::kPanel];
  RowState<typename C::T> state[kMergeWarps];
};

// Bytes of shared memory for `splits`: a MergeShared, a problem if packed, and the weight of each split.
template <class C>
int64_t merge_shared_bytes(int64_t splits) {
  return kSharedBytes<C, MergeShared<C>> + splits * int64_t(sizeof(typename C::T));
}

constexpr int kEmptySplit = -1;  // in place of the weight of a split without keys

// The state of a row over all splits. Leaves the weights w_k in `weights`. Split k is at states[k * stride].
template <class T>
SCALEDOT_DEVICE RowState<T> merge_states(const RowState<T>* states, int64_t stride, int splits, RowState<T>* of_warp,
                                         T* weights) {
  RowState<T> total = empty_row<T>();
  for (int k = thread_index(); k < splits; k += kMergeThreads) {
    const RowState<T> state = global_load(states + k * stride);
    if (state.sum != T(0)) total.maximum = max(total.maximum, state.maximum);
  }
  for (int lanes = 1; lanes < kWarpSize; lanes *= 2)
    total.maximum = max(total.maximum, shuffle_xor(total.maximum, lanes));
  if (lane_index() == 0) shared_store(&of_warp[warp_index()].maximum, total.maximum);
  barrier();
  for (int w = 0; w < kMergeWarps; ++w) total.maximum = max(total.maximum, shared_load(&of_warp[w].maximum));

  T sum = T(0);
  for (int k = thread_index(); k < splits; k += kMergeThreads) {
    const RowState<T> state = global_load(states + k * stride);
    const T weight = state.maximum == total.maximum ? T(1) : exp(state.maximum - total.maximum);
    shared_store(weights + k, state.sum == T(0) ? T(kEmptySplit) : weight);
    if (state.sum != T(0)) sum += state.sum * weight;
  }
  for (int lanes = 1; lanes < kWarpSize; lanes *= 2) sum += shuffle_xor(sum, lanes);
  if (lane_index() == 0) shared_store(&of_warp[warp_index()].sum, sum);
  barrier();
  for (int w = 0; w < kMergeWarps; ++w) total.sum += shared_load(&of_warp[w].sum);
  return total;
}

// The sum of w_k O_k over the splits of each warp, in `sums`.
template <class C, class T>
SCALEDOT_DEVICE void merge_outputs(const T* partials, int64_t stride, int splits, const T* weights, T* sums) {
  constexpr int kColumns = C::kPanel / kWarpSize;  // of a thread
  using Columns = AlignedVector<T, kColumns>;
  const int first = lane_index() * kColumns;
  Columns sum = {};
#pragma unroll 4
  for (int k = warp_index(); k < splits; k += kMergeWarps) {
    const T weight = shared_load(weights + k);
    if (weight < T(0)) continue;
    const Columns out = global_load(reinterpret_cast<const Columns*>(partials + k * stride * C::kPanel + first));
#pragma unroll
    for (int j = 0; j < kColumns; ++j) sum.x[j] += out.x[j] * weight;
  }
  shared_store(reinterpret_cast<Columns*>(sums + warp_index() * C::kPanel + first), sum);
}

// The results of a row in column `col`. `out`: the sum of w_k O_k.
template <class C, class T>
SCALEDOT_DEVICE void store_merged(const Problem& p, const GenericForwardPlan<T>& plan, const StackedTile& tile, int r,
                                  int64_t col, RowState<T> total, T out) {
  using Storage = typename C::Storage;
  const ThreadRow<T> row = thread_row<T>(p, tile, r, {0, 0});
  if (col < p.value_dim) {
    const T exact = out * output_factor_of<C>(p, tile, total, T(dropout_scale(p)));
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
  if (col != 0) return;
  if (p.lse.data)
    global_store(element_ptr<T>(p, p.lse, tile.batch, row.head) + row.i * p.lse.row_stride, logsumexp(total));
  if (plan.states) global_store(plan.states + row_number(p, tile, row), total);
}

template <class C>
SCALEDOT_KERNEL(kMergeThreads)
merge_kernel(SCALEDOT_PARAM Problem given, SCALEDOT_PARAM GenericForwardPlan<typename C::T> plan) {
  using T = typename C::T;
  static_assert(C::kPanel <= kMergeThreads);
  auto& shared = *static_cast<MergeShared<C>*>(shared_memory());
  auto* weights = reinterpret_cast<T*>(reinterpret_cast<char*>(&shared) + kSharedBytes<C, MergeShared<C>>);
  const int slice = int(block_index() % plan.merge_slices);
  QueryTask task = query_task(block_index() / plan.merge_slices, plan.tiling, plan.panels, 1);
  // Numbers of rows of partial results: of the first split, and from split to split.
  const int64_t tiles = tiles_per_kv_group(plan.tiling), stride = tiles * plan.panels * plan.tile_rows;
  const int64_t first = task.kv_group * plan.splits * stride + (task.tile * plan.panels + task.panel) * plan.tile_rows;
  const Problem& p = problem_of_block<C, kMergeThreads>(given, task.kv_group, &shared + 1);
  const StackedTile tile = query_tile(p, plan.tiling, task.kv_group, task.tile);
  if (is_empty<C>(tile)) return;
  for (int r = slice; r < tile_rows(tile); r += int(plan.merge_slices)) {
    const RowState<T> total =
        merge_states<T>(plan.partial_states + first + r, stride, int(plan.splits), shared.state, weights);
    merge_outputs<C, T>(plan.partials + (first + r) * C::kPanel, stride, int(plan.splits), weights, shared.out);
    barrier();
    if (thread_index() >= C::kPanel) continue;
    T out = T(0);
    for (int w = 0; w < kMergeWarps; ++w) out += shared_load(shared.out + w * C::kPanel + thread_index());
    store_merged<C, T>(p, plan, tile, r, int64_t(task.panel) * C::kPanel + thread_index(), total, out);
  }
}

}  // namespace
}  // namespace scaledot
