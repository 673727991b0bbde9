// Barriers in shared memory that count arrivals of threads and bytes of asynchronous copies (PTX ISA, "mbarrier").
//
// A phase of a barrier ends when the number of threads that it was initialised for have arrived and all announced bytes
// have come. mbarrier_wait(b, parity) returns when the last phase of that parity has ended. A new barrier counts as
// being after a phase of parity 1.
#pragma once

#include "cuda/ptx/device.h"
#include "cuda/ptx/watchdog.h"

namespace scaledot {

#if defined(__CUDACC__)

SCALEDOT_DEVICE uint32_t shared_address(const void* address) { return uint32_t(__cvta_generic_to_shared(address)); }

// Called by one thread. It then calls mbarrier_init_fence, and a barrier of the block follows.
SCALEDOT_DEVICE void mbarrier_init(uint64_t* b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
SCALEDOT_DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\n" ::: "memory");
}
SCALEDOT_DEVICE void mbarrier_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(b)) : "memory");
}
// Arrives, and announces the bytes that copies will bring in this phase.
SCALEDOT_DEVICE void mbarrier_arrive_expect(uint64_t* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(b)), "r"(bytes)
               : "memory");
}
#if defined(SCALEDOT_WATCHDOG)
SCALEDOT_DEVICE void mbarrier_wait(uint64_t* b, int parity) {
  const Watchdog watchdog;
  for (uint32_t over = 0; !over; watchdog.look())
    asm volatile(
        "{\n"
        ".reg .pred over;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
        "selp.u32 %0, 1, 0, over;\n"
        "}\n"
        : "=r"(over)
        : "r"(shared_address(b)), "r"(parity)
        : "memory");
}
#else
SCALEDOT_DEVICE void mbarrier_wait(uint64_t* b, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
      "@over bra OVER;\n"
      "bra WAIT;\n"
      "OVER:\n"
      "}\n" ::"r"(shared_address(b)),
      "r"(parity)
      : "memory");
}
#endif

#else

SCALEDOT_DEVICE uint32_t shared_address(const void* address) { return sim::shared_address(address); }
SCALEDOT_DEVICE void mbarrier_init(uint64_t* b, int arrivals) { sim::mbarrier_init("mbarrier_init", b, arrivals); }
SCALEDOT_DEVICE void mbarrier_init_fence() { sim::fence_async(); }
SCALEDOT_DEVICE void mbarrier_arrive(uint64_t* b) { sim::mbarrier_arrive("mbarrier_arrive", b, 0); }
SCALEDOT_DEVICE void mbarrier_arrive_expect(uint64_t* b, int bytes) {
  sim::mbarrier_arrive("mbarrier_arrive_expect", b, bytes);
}
SCALEDOT_DEVICE void mbarrier_wait(uint64_t* b, int parity) { sim::mbarrier_wait("mbarrier_wait", b, parity); }

#endif

}  // namespace scaledot
