// Semaphores in global memory: blocks that add to the same memory one after the other.
//
// The counter holds the number of the turn that is next, and ~number before the first one. Writes before
// semaphore_release are visible after the next block's semaphore_wait: writes by threads that are ordered before the
// release, and writes by the copy engine that were waited for with bulk_wait.
#pragma once

#include "cuda/ptx/memory.h"
#include "cuda/ptx/watchdog.h"

namespace scaledot {

// The counter before turn `first`, the first one.
SCALEDOT_FN int semaphore_before(int first) { return ~first; }

#if defined(__CUDACC__)

// Returns whether this turn is the first one.
SCALEDOT_DEVICE bool semaphore_wait(const int* counter, int turn) {
  const Watchdog watchdog;
  int now;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(now) : "l"(counter) : "memory");
    watchdog.look();
  } while (now != turn && now != semaphore_before(turn));
  asm volatile("fence.proxy.async.global;\n" ::: "memory");
  return now < 0;
}
// Passes on to the turn after this one.
SCALEDOT_DEVICE void semaphore_release(int* counter, int turn) {
  asm volatile("fence.proxy.async.global;\nst.release.gpu.global.s32 [%0], %1;\n" ::"l"(counter), "r"(turn + 1)
               : "memory");
}

#else

// Blocks of the simulation run one after the other, so a value that has not been reached never will be.
SCALEDOT_DEVICE bool semaphore_wait(const int* counter, int turn) {
  const int now = global_load(counter);
  if (now != turn && now != semaphore_before(turn))
    throw sim::Failure("semaphore_wait: deadlock, it is another block's turn");
  return now < 0;
}
SCALEDOT_DEVICE void semaphore_release(int* counter, int turn) { global_store(counter, turn + 1); }

#endif

}  // namespace scaledot
