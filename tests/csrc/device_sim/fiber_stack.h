// Tells AddressSanitizer which stack runs. Otherwise it takes a fiber's stack for memory outside of the thread's stack.
// The functions that are declared weak exist only in programs built with AddressSanitizer.
#pragma once

#include <cstddef>

extern "C" {
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t bytes);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_bottom, size_t* old_bytes);
[[gnu::weak]] void __asan_unpoison_memory_region(const volatile void* begin, size_t bytes);
}

namespace scaledot::sim {

// Every jump from one stack to another is: leave() or end(), the jump, and arrive() on the other stack.
struct FiberStack {
  const void* bottom = nullptr;  // the lowest address
  size_t bytes = 0;
  void* fake = nullptr;  // what AddressSanitizer keeps for this stack while another one runs

  // A stack on which nothing runs yet. Functions that never returned may have left poisoned memory on it.
  static FiberStack fresh(void* bottom, size_t bytes) {
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(bottom, bytes);
    return {bottom, bytes, nullptr};
  }

  void leave(const FiberStack& to) {
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&fake, to.bottom, to.bytes);
  }
  // Instead of leave(), if nothing will run on this stack again.
  static void end(const FiberStack& to) {
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(nullptr, to.bottom, to.bytes);
  }
  // Also learns where the stack `from` is, because only AddressSanitizer knows that of a thread's own stack.
  void arrive(FiberStack& from) {
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(fake, &from.bottom, &from.bytes);
  }
};

}  // namespace scaledot::sim
