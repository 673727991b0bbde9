// Warpgroups (four warps), barriers among some warps of a block, and reallocation of registers.
#pragma once

#include "cuda/ptx/device.h"

namespace scaledot {

constexpr int kWarpgroupThreads = 128;

#if defined(__CUDACC__)

// x, which must be the same in all threads of a warp, as a value that the compiler knows to be uniform.
SCALEDOT_DEVICE int warp_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// Waits until `threads` threads (a multiple of 32) have arrived at barrier `id`, 1 to 15, by either function.
SCALEDOT_DEVICE void named_barrier_wait(int id, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
// Arrives without waiting.
SCALEDOT_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// Sets the registers of each thread to kCount, a multiple of 8 from 24 to 256 (PTX ISA, "setmaxnreg"). All warps of a
// warpgroup call it. The kernel starts with a fixed number (__launch_bounds__). dealloc lowers it, alloc raises it.
template <int kCount>
SCALEDOT_DEVICE void dealloc_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kCount));
}
template <int kCount>
SCALEDOT_DEVICE void alloc_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kCount));
}

SCALEDOT_DEVICE int atomic_add(int* to, int x) { return atomicAdd(to, x); }
// Adds 1 to a counter that stays below kMaxCount, and returns the earlier value. The thread waits for that only where
// it is used. An atomic addition would be one for the whole warp, and the thread would wait at once for its share.
constexpr uint32_t kMaxCount = 0x7fffffff;
SCALEDOT_DEVICE int atomic_count(int* counter) {
  int before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;\n"
               : "=r"(before)
               : "l"(counter), "r"(kMaxCount)
               : "memory");
  return before;
}

#else

SCALEDOT_DEVICE int warp_uniform(int x) { return x; }
SCALEDOT_DEVICE void named_barrier_wait(int id, int threads, sim::Place place = sim::here()) {
  sim::come_together("named_barrier_wait", place);
  sim::named_barrier("named_barrier_wait", id, threads, true);
}
SCALEDOT_DEVICE void named_barrier_arrive(int id, int threads, sim::Place place = sim::here()) {
  sim::come_together("named_barrier_arrive", place);
  sim::named_barrier("named_barrier_arrive", id, threads, false);
}
template <int kCount>
SCALEDOT_DEVICE void dealloc_registers(sim::Place place = sim::here()) {
  sim::come_together("dealloc_registers", place);
  sim::set_max_registers("dealloc_registers", kCount);
}
template <int kCount>
SCALEDOT_DEVICE void alloc_registers(sim::Place place = sim::here()) {
  sim::come_together("alloc_registers", place);
  sim::set_max_registers("alloc_registers", kCount);
}
SCALEDOT_DEVICE int atomic_add(int* to, int x) { return sim::atomic_add("atomic_add", to, x); }
SCALEDOT_DEVICE int atomic_count(int* counter) { return sim::atomic_add("atomic_count", counter, 1); }

#endif

SCALEDOT_DEVICE int warpgroup_index() { return warp_uniform(thread_index() / kWarpgroupThreads); }

}  // namespace scaledot
