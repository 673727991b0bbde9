// Barriers, and what the threads of a warp tell each other.
#pragma once

#include "cuda/ptx/device.h"

namespace scaledot {

#if defined(__CUDACC__)

// All threads of the block; what they wrote to shared and global memory before is seen after.
SCALEDOT_DEVICE void barrier() { __syncthreads(); }
// The same, and whether `predicate` holds in any thread.
SCALEDOT_DEVICE bool barrier_or(bool predicate) { return __syncthreads_or(predicate) != 0; }
// All threads of the warp; orders their shared memory accesses.
SCALEDOT_DEVICE void warp_barrier() { __syncwarp(); }
// The value of the thread whose lane differs in the bits of `mask`.
SCALEDOT_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
SCALEDOT_DEVICE double shuffle_xor(double x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
// The value of lane `from`, the same for all lanes or one of each.
SCALEDOT_DEVICE uint32_t shuffle_from(uint32_t x, int from) { return __shfl_sync(0xffffffffu, x, from); }

#else

SCALEDOT_DEVICE void barrier() { sim::barrier_or("barrier", false); }
SCALEDOT_DEVICE bool barrier_or(bool predicate) { return sim::barrier_or("barrier_or", predicate); }
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

}  // namespace scaledot
