// Four warps that work as one, barriers among some of the block's warps, and how a block deals out its registers.
#pragma once

#include "cuda/ptx/device.h"

namespace scaledot {

constexpr int kWarpgroupThreads = 128;

#if defined(__CUDACC__)

// The same for all threads of a warp, and known to the compiler to be.
SCALEDOT_DEVICE int warp_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// Waits until `threads` threads (a multiple of 32) have come to barrier `id`, 1 to 15, by either call.
SCALEDOT_DEVICE void named_barrier_wait(int id, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
// Counts as having come, and goes on.
SCALEDOT_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// Registers of each thread from now on, by all warps of a warpgroup; a multiple of 8 from 24 to 256. The kernel must have been
// compiled for a fixed number (__launch_bounds__), which is more than kCount when giving and less when taking.
template <int kCount>
SCALEDOT_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kCount));
}
template <int kCount>
SCALEDOT_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kCount));
}

SCALEDOT_DEVICE int atomic_add(int* to, int x) { return atomicAdd(to, x); }

#else

SCALEDOT_DEVICE int warp_uniform(int x) { return x; }
SCALEDOT_DEVICE void named_barrier_wait(int id, int threads) {
  sim::named_barrier("named_barrier_wait", id, threads, true);
}
SCALEDOT_DEVICE void named_barrier_arrive(int id, int threads) {
  sim::named_barrier("named_barrier_arrive", id, threads, false);
}
template <int kCount>
SCALEDOT_DEVICE void give_registers() {
  sim::set_max_registers("give_registers", kCount);
}
template <int kCount>
SCALEDOT_DEVICE void take_registers() {
  sim::set_max_registers("take_registers", kCount);
}
SCALEDOT_DEVICE int atomic_add(int* to, int x) { return sim::atomic_add("atomic_add", to, x); }

#endif

SCALEDOT_DEVICE int warpgroup_index() { return warp_uniform(thread_index() / kWarpgroupThreads); }

}  // namespace scaledot
