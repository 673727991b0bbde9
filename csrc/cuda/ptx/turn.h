// Blocks that add to the same place in global memory one after the other.
//
// A counter in global memory says whose turn it is. What is written before turn_end, by threads of the block that are ordered before it
// or by the copy engine and waited for with bulk_wait, is seen after the next block's turn_wait.
#pragma once

#include "cuda/ptx/memory.h"

namespace scaledot {

#if defined(__CUDACC__)

SCALEDOT_DEVICE void turn_wait(const int* counter, int turn) {
  int now;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(now) : "l"(counter) : "memory");
  } while (now != turn);
  asm volatile("fence.proxy.async;\n" ::: "memory");
}
SCALEDOT_DEVICE void turn_end(int* counter) {
  asm volatile("fence.proxy.async;\nred.release.gpu.global.add.s32 [%0], 1;\n" ::"l"(counter) : "memory");
}

#else

// Blocks of the simulation run one after the other: a turn that has not come never will.
SCALEDOT_DEVICE void turn_wait(const int* counter, int turn) {
  if (global_load(counter) != turn) throw sim::Failure("turn_wait: deadlock, it is another block's turn");
}
SCALEDOT_DEVICE void turn_end(int* counter) { global_store(counter, global_load(counter) + 1); }

#endif

}  // namespace scaledot
