// The first kernel of the backward for sm_90: delta of every row, lse as one number, and what backward_prepare.cuh has.
//
//   delta_i = sum_d dO_id O_id - dlse_i      (O: with its low part, if that was saved)
//
// Its time is that of its bytes: rows are loaded in chunks of 16 bytes, several at a time, and the place of a tile's
// rows is computed once. Where one number is not precise enough for lse (core/softmax.h), the next kernel computes it
// once more (backward_lse.cuh).
#pragma once

#include "cuda/ptx/convert.h"
#include "cuda/sm90/backward_prepare.cuh"
#include "cuda/sm90/tensors.h"

namespace scaledot {
namespace {

// Rows that are loaded by (batch entry, head, row). Strides are in elements. No data: nullptr.
struct Sm90Rows {
  const void* data;
  int64_t batch, head, row, col;
};
struct Sm90DeltaTensors {
  Sm90Rows output, output_low, grad_output, lse, grad_lse;
  bool chunks;     // 16 bytes can be loaded at once
  bool one_batch;  // `batch` is right: the batch dimensions are one in memory
};

inline Sm90DeltaTensors make_delta_tensors(const Problem& all) {
  Sm90DeltaTensors made = {};
  made.chunks = all.value_dim % 8 == 0, made.one_batch = true;
  const auto make = [&](const TensorView& view, bool has_columns) -> Sm90Rows {
    if (!view.data) return {};
    const BatchStride batch = batch_stride(all, view);
    made.one_batch &= batch.is_one;
    if (has_columns) {
      for (const int64_t stride : {batch.stride, view.head_stride, view.row_stride}) made.chunks &= stride % 8 == 0;
      made.chunks &= batch.is_one && view.col_stride == 1 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
    }
    return {view.data, batch.stride, view.head_stride, view.row_stride, view.col_stride};
  };
  made.output = make(all.output, true), made.output_low = make(all.output_low, true);
  made.grad_output = make(all.grad_output, true);
  made.lse = make(all.lse, false), made.grad_lse = make(all.grad_lse, false);
  return made;
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

// Loads 8 elements one by one, of which `count` exist.
SCALEDOT_DEVICE AlignedVector<uint32_t, 4> gather_chunk(const uint16_t* from, int64_t stride, int64_t count) {
  AlignedVector<uint32_t, 4> chunk = {};
#pragma unroll
  for (int e = 0; e < 8; ++e)
    if (e < count) chunk.x[e / 2] |= uint32_t(global_load(from + e * stride)) << e % 2 * 16;
  return chunk;
}

struct Sm90DeltaShared {
  Sm90CountShared count;
  Problem problem;  // of a packed sequence
};

constexpr int64_t kDeltaBlocks = 2;  // a multiprocessor: as many as run at the same time

// A block takes one tile of rows after the other. kLanes neighbouring threads share a row.
template <class C>
SCALEDOT_KERNEL(kRowThreads)
sm90_delta_kernel(SCALEDOT_PARAM Problem p, SCALEDOT_PARAM Sm90BackwardPlan plan,
                  SCALEDOT_PARAM Sm90DeltaTensors from) {
  using Chunk = AlignedVector<uint32_t, 4>;
  constexpr int kLanes = C::kValueDim / 8, kRowsAtOnce = kRowThreads / kLanes, kLoads = 4;  // of each tensor at a time
  static_assert(C::kRows % (kRowsAtOnce * kLoads) == 0 && kLoads <= kLanes && kLanes <= kWarpSize);
  Problem* mine = nullptr;
  if constexpr (C::kPacked) {
    mine = &static_cast<Sm90DeltaShared*>(shared_memory())->problem;
    copy_problem<kRowThreads>(p, *mine);
    store_all_tile_starts<C>(p, plan);
  }
  const int lane = thread_index() % kLanes, group = thread_index() / kLanes;
  bool precise = true;
  const int64_t tiles = row_tile_count<C::kPacked>(p, plan);
  for (int64_t number = block_index(); number < tiles; number += block_count()) {
    const Sm90RowTile tile = row_tile<C::kPacked>(p, plan, number, C::kRows);
    const int64_t first = tile.tile * C::kRows;
    const int rows = int(min<int64_t>(tile.rows.count - first, C::kRows));
    const auto place = [&](const Sm90Rows& of, const TensorView& view) {
      const int64_t start =
          from.one_batch ? tile.batch * of.batch + tile.head * of.head : offset(p, view, tile.batch, tile.head);
      return start + (tile.rows.first + first) * of.row;
    };
    const auto columns = [&](const Sm90Rows& of, const TensorView& view) {
      return static_cast<const uint16_t*>(of.data) + place(of, view) + lane * 8 * of.col;
    };
    const uint16_t *output = columns(from.output, p.output), *grad = columns(from.grad_output, p.grad_output);
    const uint16_t* low = columns(from.output_low, p.output_low);
    const float* lse = static_cast<const float*>(from.lse.data) + place(from.lse, p.lse);
    const float* grad_lse = static_cast<const float*>(from.grad_lse.data) + place(from.grad_lse, p.grad_lse);
    const int64_t first_number =
        p.heads * tile.rows.first + (tile.batch * p.heads + tile.head) * tile.rows.count + first;
#pragma unroll 1
    for (int begin = group; begin < C::kRows; begin += kLoads * kRowsAtOnce) {
      Chunk of_output[kLoads], of_low[kLoads], of_grad[kLoads];
      const int64_t columns_left = p.value_dim - lane * 8;
      const auto load_all = [&](const auto& load) {
#pragma unroll
        for (int k = 0; k < kLoads; ++k) {
          const int r = begin + k * kRowsAtOnce;
          of_output[k] = of_low[k] = of_grad[k] = Chunk{};
          if (r >= rows || columns_left <= 0) continue;
          of_output[k] = load(output + r * from.output.row, from.output);
          of_grad[k] = load(grad + r * from.grad_output.row, from.grad_output);
          if (from.output_low.data) of_low[k] = load(low + r * from.output_low.row, from.output_low);
        }
      };
      if (from.chunks)
        load_all([&](const uint16_t* at, const Sm90Rows&) { return global_load(reinterpret_cast<const Chunk*>(at)); });
      else
        load_all([&](const uint16_t* at, const Sm90Rows& of) { return gather_chunk(at, of.col, columns_left); });
      // Lane k stores the numbers of the row of load k. Rows that pad the last tile have weights of 0.
      const int mine_row = begin + lane * kRowsAtOnce;
      const bool stores = lane < kLoads, exists = stores && mine_row < rows;
      const float of_lse = exists ? shift(global_load(lse + mine_row * from.lse.row)) : __builtin_inff();
      float delta = exists && from.grad_lse.data ? -global_load(grad_lse + mine_row * from.grad_lse.row) : 0;
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        float sum = add_products<typename C::Storage>(0, of_output[k], of_low[k], of_grad[k]);
#pragma unroll
        for (int mask = 1; mask < kLanes; mask *= 2) sum += shuffle_xor(sum, mask);
        if (lane == k) delta += sum;
      }
      if (!stores) continue;
      const SplitLse<float> split = {of_lse, 0};
      pack_row<C>(p, plan, tile, number, mine_row, split, delta);
      if (!exists) continue;
      precise &= lse_is_precise(of_lse, kPreciseLse16);
      global_store(plan.rows.delta + first_number + mine_row, delta);
      global_store(plan.rows.lse + first_number + mine_row, split);
    }
    if (thread_index() == 0) store_semaphores<C>(p, plan, tile, number, mine);
  }
  store_row_ranges<C>(p, plan, mine);
  if (block_index() == 0 && thread_index() == 0) {
    global_store(plan.ticket, 0);
    if (plan.has_nan) global_store(plan.has_nan, 0);
  }
  const bool imprecise = barrier_or(!precise);
  if (thread_index() == 0) global_store(plan.imprecise + block_index(), int(imprecise));
}

}  // namespace
}  // namespace scaledot
