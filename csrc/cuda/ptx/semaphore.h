// Semaphores in global memory: blocks that add to the same memory one after the other.
//
// The counter holds the number of the block whose turn it is. Writes before semaphore_release are visible after the
// next block's semaphore_wait: writes by threads that are ordered before the release, and writes by the copy engine
// that were waited for with bulk_wait.
#pragma once

#include "cuda/ptx/memory.h"
#include "cuda/ptx/watchdog.h"

namespace scaledot {

#if defined(__CUDACC__)

SCALEDOT_DEVICE void semaphore_wait(const int* counter, int wanted) {
  const Watchdog watchdog;
  int now;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(now) : "l"(counter) : "memory");
    watchdog.look();
  } while (now != wanted);
  asm volatile("fence.proxy.async.global;\n" ::: "memory");
}
SCALEDOT_DEVICE void semaphore_release(int* counter) {
  asm volatile("fence.proxy.async.global;\nred.release.gpu.global.add.s32 [%0], 1;\n" ::"l"(counter) : "memory");
}

#else

// Blocks of the simulation run one after the other, so a value that has not been reached never will be.
SCALEDOT_DEVICE void semaphore_wait(const int* counter, int wanted) {
  if (global_load(counter) != wanted) throw sim::Failure("semaphore_wait: deadlock, it is another block's turn");
}
SCALEDOT_DEVICE void semaphore_release(int* counter) { global_store(counter, global_load(counter) + 1); }

#endif

}  // namespace scaledot
