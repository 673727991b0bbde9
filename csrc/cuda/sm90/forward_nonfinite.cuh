// Non-finite values (NaN or inf) that a mask hides from some rows. A masked weight is 0, and 0 times NaN is NaN. Before
// a forward with masks a kernel finds out which tiles of values are finite. For the other tiles, the product with the
// weights is computed without the masked terms.
#pragma once

#include "cuda/ptx/tma.h"
#include "cuda/sm90/forward_scores.cuh"

namespace scaledot {
namespace {

constexpr int kFiniteThreads = 256;

// Whether some of `count` rows of values is not finite. All threads of a block.
template <class Storage>
SCALEDOT_DEVICE bool has_nonfinite_rows(const Storage* values, int64_t row_stride, int64_t count, int64_t cols) {
  using Eight = AlignedVector<Storage, 8>;
  const int chunks = int(ceil_div(cols, 8));
  bool found = false;
  for (int k = thread_index(); k < count * chunks; k += kFiniteThreads) {
    const Storage* from = values + k / chunks * row_stride;
    const int col = k % chunks * 8;
    if (col + 8 <= cols) {
      const Eight eight = global_load(reinterpret_cast<const Eight*>(from + col));
#pragma unroll
      for (int e = 0; e < 8; ++e) found |= !(widen(eight.x[e]) - widen(eight.x[e]) == 0);
    } else {
      for (int64_t d = col; d < cols; ++d) {
        const float x = widen(global_load(from + d));
        found |= !(x - x == 0);
      }
    }
  }
  return barrier_or(found);
}

// finite[batch * kv_heads + kv_head, key tile]: whether all values of the tile are finite. A block a tile.
template <class Storage>
SCALEDOT_KERNEL(kFiniteThreads)
sm90_finite_values_kernel(SCALEDOT_PARAM Problem p, int keys, uint8_t* finite) {
  const int64_t tiles = ceil_div(p.key_length, keys), batch_kv_head = block_index() / tiles;
  const int64_t first = block_index() % tiles * keys, count = min<int64_t>(keys, p.key_length - first);
  const Storage* values = at<const Storage>(p, p.value, batch_kv_head / p.kv_heads, batch_kv_head % p.kv_heads);
  const bool found = has_nonfinite_rows(values + first * p.value.row_stride, p.value.row_stride, count, p.value_dim);
  if (thread_index() == 0) global_store(finite + block_index(), uint8_t(!found));
}

// out += weights values, element by element and without masked terms.
template <class C>
SCALEDOT_DEVICE void multiply_unmasked(const Problem& p, const Sm90ThreadRows<C>& rows, int first_key,
                                       const uint32_t (&weights)[C::kKeys / 16][4],
                                       const SwizzledTile<C::kKeys, C::kValueDim>& values,
                                       float (&out)[C::kValueDim / 2]) {
  using Storage = typename C::Storage;
  uint32_t pairs[C::kKeys / 4];  // in memory, so that an index known at run time can select one
#pragma unroll
  for (int k = 0; k < C::kKeys / 16; ++k)
#pragma unroll
    for (int r = 0; r < 4; ++r) pairs[4 * k + r] = weights[k][r];
  const int keys = int(min<int64_t>(C::kKeys, p.key_length - first_key));
  const FragmentOrigin origin = fragment_origin();
#pragma unroll 1
  for (int k = 0; k < keys; ++k) {
    const int lane = (lane_index() & ~3) | (k % 8 / 2);
    float weight[2];
    bool masked[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t pair = shuffle_from(pairs[k / 16 * 4 + k % 16 / 8 * 2 + half], lane);
      weight[half] = widen(Storage{uint16_t(k % 2 ? pair >> 16 : pair)});
      masked[half] = is_masked<C>(p, rows, half, first_key, k);
    }
    const char* row = reinterpret_cast<const char*>(values.data) + 2 * origin.col;
#pragma unroll
    for (int n = 0; n < C::kValueDim / 8; ++n) {
      // Four threads share 16 bytes of a row.
      const int at = n / 8 * values.kPanelBytes + swizzled_byte(k, n % 8 * 16);
      const uint32_t pair = shared_load(reinterpret_cast<const uint32_t*>(row + at));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float x = widen(Storage{uint16_t(j ? pair >> 16 : pair)});
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (!masked[half]) out[4 * n + 2 * half + j] += weight[half] * x;
      }
    }
  }
}

}  // namespace
}  // namespace scaledot
