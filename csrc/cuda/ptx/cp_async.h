// Asynchronous copies from global to shared memory, 16 bytes a thread (PTX ISA, "cp.async").
#pragma once

#include "cuda/ptx/device.h"

namespace scaledot {

constexpr int kCopyBytes = 16;

#if defined(__CUDACC__)

// Copies the first `bytes` of 16 bytes and fills the others with 0. Both addresses are multiples of 16. If `bytes` is
// 0, nothing is read.
SCALEDOT_DEVICE void cp_async(void* to_shared, const void* from_global, int bytes) {
  const uint32_t to = uint32_t(__cvta_generic_to_shared(to_shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from_global), "r"(bytes) : "memory");
}
// Waits for all copies of this thread. Other threads see them after a barrier.
SCALEDOT_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }
// Makes one group of this thread's copies since the last commit; there may be none.
SCALEDOT_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits for the copies of all groups but the last one.
SCALEDOT_DEVICE void cp_async_wait_older() { asm volatile("cp.async.wait_group 1;\n" ::: "memory"); }

#else

SCALEDOT_DEVICE void cp_async(void* to_shared, const void* from_global, int bytes) {
  sim::cp_async("cp_async", to_shared, from_global, bytes);
}
SCALEDOT_DEVICE void cp_async_wait_all() { sim::cp_async_wait_all(); }
SCALEDOT_DEVICE void cp_async_commit() { sim::cp_async_commit(); }
SCALEDOT_DEVICE void cp_async_wait_older() { sim::cp_async_wait_older(); }

#endif

}  // namespace scaledot
