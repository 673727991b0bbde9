// With SCALEDOT_WATCHDOG, a wait that takes too long ends the kernel with an error, and CUDA can write a core dump that
// shows who waits where. Without it, such a kernel would hang. tests/gpu/build makes a library with it.
#pragma once

#include "cuda/ptx/device.h"

namespace scaledot {

#if defined(__CUDACC__) && defined(SCALEDOT_WATCHDOG)

constexpr uint64_t kLongestWait = 2'000'000'000;  // nanoseconds

SCALEDOT_DEVICE uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;\n" : "=l"(now));
  return now;
}

// Made when a wait begins, and asked again and again.
struct Watchdog {
  uint64_t begin;
  SCALEDOT_MEMBER Watchdog() : begin(nanoseconds()) {}
  SCALEDOT_MEMBER void look() const {
    if (nanoseconds() - begin > kLongestWait) asm volatile("trap;\n");
  }
};

#elif defined(__CUDACC__)

struct Watchdog {
  SCALEDOT_MEMBER void look() const {}
};

#endif

}  // namespace scaledot
