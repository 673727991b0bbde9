// Non-finite values (NaN or inf) that a mask hides from some rows. A masked weight is 0, and 0 times NaN is NaN. So a
// forward with masks notes which query tiles have NaN in their output. A second launch computes these once more, and
// leaves masked terms out for key tiles with non-finite values. If no tile is noted, it ends at once.
#pragma once

#include "cuda/ptx/sync.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90/forward_plan.cuh"

namespace scaledot {
namespace {

// Whether the output of a thread has NaN.
template <class C>
SCALEDOT_DEVICE bool has_nan(const float (&out)[C::kValueDim / 2]) {
  float sum = 0;  // NaN if one of the numbers is
#pragma unroll
  for (int e = 0; e < C::kValueDim / 2; ++e) sum += out[e];
  return sum != sum;
}

// Notes query tile `tile`, if no other thread has.
SCALEDOT_DEVICE void note_tile(const Sm90NanTiles& nan, int tile) {
  if (atomic_add(nan.marks + tile, 1) == 0) global_store(nan.tiles + atomic_add(nan.count, 1), tile);
}

// Whether all values of a tile in shared memory are finite. Called by whole warps, any thread of which may release the
// tile to the copy engine afterwards: shuffles do not order reads. The optimization barrier keeps addresses of this
// rare loop out of the registers of the others.
template <class Storage, class Tile>
SCALEDOT_DEVICE bool is_finite(const Tile& values) {
  using Eight = AlignedVector<Storage, 8>;
  float sum = 0;
#pragma unroll 1
  for (int k = opt_barrier(lane_index()); k < Tile::kBytes / int(sizeof(Eight)); k += kWarpSize) {
    const Eight eight = shared_load(reinterpret_cast<const Eight*>(values.data) + k);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += widen(eight.x[e]) * 0.0f;
  }
#pragma unroll 1
  for (int mask = 1; mask < kWarpSize; mask *= 2) sum += shuffle_xor(sum, mask);
  fence_async();
  warp_barrier();
  return sum == 0;
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
