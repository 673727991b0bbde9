// Barriers, and exchange of values within a warp.
#pragma once

#include "cuda/ptx/device.h"

namespace scaledot {

#if defined(__CUDACC__)

// Barrier of the block. Its threads' earlier writes to shared and global memory are visible after it.
SCALEDOT_DEVICE void barrier() { __syncthreads(); }
// Barrier of the block that returns whether `predicate` holds in any thread.
SCALEDOT_DEVICE bool barrier_or(bool predicate) { return __syncthreads_or(predicate) != 0; }
// Barrier of the warp; orders its accesses to shared memory.
SCALEDOT_DEVICE void warp_barrier() { __syncwarp(); }
// The value of lane `lane_index() ^ mask`.
SCALEDOT_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
SCALEDOT_DEVICE double shuffle_xor(double x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
SCALEDOT_DEVICE uint32_t shuffle_xor(uint32_t x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
// The value of lane `from`, which may differ from lane to lane.
SCALEDOT_DEVICE uint32_t shuffle_from(uint32_t x, int from) { return __shfl_sync(0xffffffffu, x, from); }

#else

SCALEDOT_DEVICE void barrier(sim::Place place = sim::here()) {
  sim::come_together("barrier", place);
  sim::barrier_or("barrier", false);
}
SCALEDOT_DEVICE bool barrier_or(bool predicate, sim::Place place = sim::here()) {
  sim::come_together("barrier_or", place);
  return sim::barrier_or("barrier_or", predicate);
}
SCALEDOT_DEVICE void warp_barrier() { sim::warp_barrier("warp_barrier"); }
template <class T>
SCALEDOT_DEVICE T shuffle_xor(T x, int mask) {
  struct Operands {
    T x;
    int mask;
    T result;
  } mine = {x, mask, T(0)};
  sim::warp_collective("shuffle_xor", &mine, [](void* const* all) {
    for (int lane = 0; lane < 32; ++lane) {
      Operands& o = *static_cast<Operands*>(all[lane]);
      o.result = static_cast<Operands*>(all[lane ^ o.mask])->x;
    }
  });
  return mine.result;
}
SCALEDOT_DEVICE uint32_t shuffle_from(uint32_t x, int from) {
  struct Operands {
    uint32_t x;
    int from;
    uint32_t result;
  } mine = {x, from, 0};
  sim::warp_collective("shuffle_from", &mine, [](void* const* all) {
    for (int lane = 0; lane < 32; ++lane) {
      Operands& o = *static_cast<Operands*>(all[lane]);
      o.result = static_cast<Operands*>(all[o.from])->x;
    }
  });
  return mine.result;
}

#endif

SCALEDOT_DEVICE int64_t shuffle_from(int64_t x, int from) {
  const uint32_t low = shuffle_from(uint32_t(x), from), high = shuffle_from(uint32_t(uint64_t(x) >> 32), from);
  return int64_t(uint64_t(high) << 32 | low);
}

}  // namespace scaledot
