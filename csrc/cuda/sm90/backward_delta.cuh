// The first kernel of the backward for sm_90: delta of every row, and lse as one number.
//
//   delta_i = sum_d dO_id O_id - dlse_i      (O: with its low part, if that was saved)
//
// Its time is that of its bytes: rows are loaded in chunks of 16 bytes, several at a time, and the place of a tile's
// rows is computed once. Where one number is not precise enough for lse (core/softmax.h), the generic prepare_kernel,
// which follows, computes it once more.
#pragma once

#include "cuda/ptx/convert.h"
#include "cuda/sm90/backward_packed.cuh"
#include "cuda/sm90/tensors.h"

namespace scaledot {
namespace {

// Rows that are loaded by (batch entry, head, row). Strides are in elements. No data: nullptr.
struct Sm90Rows {
  const void* data;
  int64_t batch, head, row;
};
struct Sm90DeltaTensors {
  Sm90Rows output, output_low, grad_output, lse, grad_lse;
};

// Whether the kernel can load all rows: otherwise the generic kernel computes delta, too.
inline bool make_delta_tensors(const Problem& all, Sm90DeltaTensors& made) {
  bool fits = all.value_dim % 8 == 0;
  const auto make = [&](const TensorView& view, int64_t elements) -> Sm90Rows {
    const BatchStride batch = batch_stride(all, view);
    fits &= batch.is_one && (elements == 1 || view.col_stride == 1);
    for (const int64_t stride : {batch.stride, view.head_stride, view.row_stride}) fits &= stride % elements == 0;
    fits &= reinterpret_cast<uintptr_t>(view.data) % size_t(elements * element_size(view.dtype)) == 0;
    return {view.data, batch.stride, view.head_stride, view.row_stride};
  };
  constexpr int64_t kChunk = 8;  // elements of 16 bytes
  made.output = make(all.output, kChunk);
  made.grad_output = make(all.grad_output, kChunk);
  if (all.output_low.data) made.output_low = make(all.output_low, kChunk);
  made.lse = make(all.lse, 1);
  if (all.grad_lse.data) made.grad_lse = make(all.grad_lse, 1);
  return fits;
}

template <class T>
SCALEDOT_DEVICE const T* rows_of_tile(const Sm90Rows& of, const Sm90RowTile& tile, int64_t first) {
  if (!of.data) return nullptr;
  return static_cast<const T*>(of.data) + tile.batch * of.batch + tile.head * of.head +
         (tile.rows.first + first) * of.row;
}

// sum + a chunk of (O + its low part) dO.
template <class Storage>
SCALEDOT_DEVICE float add_products(float sum, const AlignedVector<uint32_t, 4>& output,
                                   const AlignedVector<uint32_t, 4>& low, const AlignedVector<uint32_t, 4>& grad) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float o[2], rest[2], g[2];
    widen_pair(output.x[k], o[0], o[1], Type<Storage>{});
    widen_pair(low.x[k], rest[0], rest[1], Type<Storage>{});
    widen_pair(grad.x[k], g[0], g[1], Type<Storage>{});
#pragma unroll
    for (int j = 0; j < 2; ++j) sum = fma(o[j] + rest[j], g[j], sum);
  }
  return sum;
}

// A block takes one tile of rows after the other. kLanes neighbouring threads share a row.
template <class C>
SCALEDOT_KERNEL(kRowThreads)
sm90_delta_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM Sm90BackwardPlan plan,
                  SCALEDOT_PARAM Sm90DeltaTensors from) {
  using Chunk = AlignedVector<uint32_t, 4>;
  constexpr int kLanes = C::kDim / 8, kRowsAtOnce = kRowThreads / kLanes, kLoads = 4;  // of each tensor at a time
  static_assert(C::kRows % (kRowsAtOnce * kLoads) == 0 && kLoads <= kLanes && kLanes <= kWarpSize);
  const int lane = thread_index() % kLanes, group = thread_index() / kLanes;
  const bool has_columns = lane * 8 < p.value_dim;
  bool precise = true;
  const int64_t tiles = row_tile_count<C>(p, plan);
  for (int64_t number = block_index(); number < tiles; number += block_count()) {
    const Sm90RowTile tile = row_tile<C>(p, plan, number);
    const int64_t first = tile.tile * C::kRows;
    const int rows = int(min<int64_t>(tile.rows.count - first, C::kRows));
    const auto* output = rows_of_tile<uint16_t>(from.output, tile, first) + lane * 8;
    const auto* low = rows_of_tile<uint16_t>(from.output_low, tile, first);
    const auto* grad = rows_of_tile<uint16_t>(from.grad_output, tile, first) + lane * 8;
    const auto* lse = rows_of_tile<float>(from.lse, tile, first);
    const auto* grad_lse = rows_of_tile<float>(from.grad_lse, tile, first);
    const int64_t first_number =
        p.heads * tile.rows.first + (tile.batch * p.heads + tile.head) * tile.rows.count + first;
#pragma unroll 1
    for (int begin = group; begin < C::kRows; begin += kLoads * kRowsAtOnce) {
      Chunk of_output[kLoads], of_low[kLoads], of_grad[kLoads];
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        const int r = begin + k * kRowsAtOnce;
        of_output[k] = of_low[k] = of_grad[k] = Chunk{};
        if (r >= rows || !has_columns) continue;
        of_output[k] = global_load(reinterpret_cast<const Chunk*>(output + r * from.output.row));
        of_grad[k] = global_load(reinterpret_cast<const Chunk*>(grad + r * from.grad_output.row));
        if (low) of_low[k] = global_load(reinterpret_cast<const Chunk*>(low + lane * 8 + r * from.output_low.row));
      }
      // Lane k stores the numbers of the row of load k.
      const int mine = begin + lane * kRowsAtOnce;
      const bool stores = lane < kLoads && mine < rows;
      const float of_lse = stores ? shift(global_load(lse + mine * from.lse.row)) : 0;
      float delta = stores && grad_lse ? -global_load(grad_lse + mine * from.grad_lse.row) : 0;
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        float sum = add_products<typename C::Storage>(0, of_output[k], of_low[k], of_grad[k]);
#pragma unroll
        for (int mask = 1; mask < kLanes; mask *= 2) sum += shuffle_xor(sum, mask);
        if (lane == k) delta += sum;
      }
      if (!stores) continue;
      precise &= lse_is_precise(of_lse, kPreciseLse16);
      global_store(plan.rows.delta + first_number + mine, delta);
      global_store(plan.rows.lse + first_number + mine, SplitLse<float>{of_lse, 0});
    }
  }
  const bool imprecise = barrier_or(!precise);
  if (thread_index() == 0) global_store(plan.rows.imprecise + block_index(), int(imprecise));
}

}  // namespace
}  // namespace scaledot
