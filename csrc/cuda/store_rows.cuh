// From a warp's accumulators to rows of 16-bit elements in global memory, without shared memory: weights, gradients and
// the low part of the output. The four lanes that share a row exchange what they have, and store 16 bytes each.
#pragma once

#include "cuda/ptx/convert.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/sync.h"

namespace scaledot {
namespace {

constexpr int kQuadLanes = 4;  // neighbouring lanes, which share rows of an accumulator

// Lane q of each quad has x[k], and gets x[q] of lane k as x[k].
SCALEDOT_DEVICE void transpose_quad(uint32_t (&x)[kQuadLanes]) {
#pragma unroll
  for (int mask = 1; mask < kQuadLanes; mask *= 2) {
    const bool upper = lane_index() & mask;
#pragma unroll
    for (int k = 0; k < kQuadLanes; ++k) {
      if (k & mask) continue;
      const uint32_t got = shuffle_xor(upper ? x[k] : x[k | mask], mask);
      x[k] = upper ? got : x[k];
      x[k | mask] = upper ? x[k | mask] : got;
    }
  }
}

// Two rows of a thread, 8 apart, that are to be stored: nullptr if a row does not exist.
template <class Storage>
struct RowPair {
  Storage* to[2];
  int64_t col_stride, cols;
  bool chunks;  // 16 bytes can be stored at once
};
// Whether rows from `to` on, of which nullptr does not count, can be stored in chunks of 16 bytes.
template <class Storage>
SCALEDOT_DEVICE bool stores_chunks(const TensorView& view, Storage* const (&to)[2], int64_t cols) {
  const uintptr_t places = reinterpret_cast<uintptr_t>(to[0]) | reinterpret_cast<uintptr_t>(to[1]);
  return places % 16 == 0 && cols % 8 == 0 && view.col_stride == 1;
}
template <class Storage>
SCALEDOT_DEVICE RowPair<Storage> row_pair(const TensorView& view, int64_t cols, Storage* rows, int64_t first,
                                          int64_t count) {
  const auto row = [&](int64_t i) { return i < count ? rows + i * view.row_stride : nullptr; };
  Storage* const to[2] = {row(first), row(first + 8)};
  return {{to[0], to[1]}, view.col_stride, cols, stores_chunks(view, to, cols)};
}

// Stores kGroups groups of 8 columns from column first_col on. All lanes of a warp; of each group a lane has two
// neighbouring columns of both rows. pair(n, half): these of group n, rounded. A lane gets from its quad all columns of
// every fourth group.
template <int kGroups, class Storage, class Pair>
SCALEDOT_DEVICE void store_row_pair(const RowPair<Storage>& rows, int first_col, const Pair& pair) {
  static_assert(kGroups % kQuadLanes == 0);
  using Chunk = AlignedVector<uint32_t, kQuadLanes>;
  const int quad = lane_index() % kQuadLanes;
#pragma unroll
  for (int n = 0; n < kGroups; n += kQuadLanes) {
    const int col = first_col + 8 * (n + quad);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Chunk chunk;
#pragma unroll
      for (int k = 0; k < kQuadLanes; ++k) chunk.x[k] = pair(n + k, half);
      transpose_quad(chunk.x);
      if (!rows.to[half]) continue;
      if (rows.chunks) {
        if (col < rows.cols) global_store(reinterpret_cast<Chunk*>(rows.to[half] + col), chunk);
        continue;
      }
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (col + e < rows.cols)
          global_store(rows.to[half] + (col + e) * rows.col_stride, Storage{uint16_t(chunk.x[e / 2] >> e % 2 * 16)});
    }
  }
}

}  // namespace
}  // namespace scaledot
