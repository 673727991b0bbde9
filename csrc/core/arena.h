// A bump allocator over the executor's workspace. A kernel lays out its workspace in one function, which runs twice:
// without memory, to count the bytes (Kernel::workspace), and with it.
#pragma once

#include "core/kernel.h"

// Defined in builds with AddressSanitizer: memory after each array is poisoned, so that one array cannot run into the
// next.
#if defined(SCALEDOT_RED_ZONES)
#include <sanitizer/asan_interface.h>
#endif

namespace scaledot {

struct Arena {
  char* base;    // nullptr: only count bytes
  int64_t used;  // bytes
};

template <class T>
static inline T* take(Arena& arena, int64_t count) {
  T* result = arena.base ? reinterpret_cast<T*>(arena.base + arena.used) : nullptr;
  const int64_t bytes = count * int64_t(sizeof(T));
#if defined(SCALEDOT_RED_ZONES)
  const int64_t total = bytes > 0 ? round_up(bytes, kAlignment) + kAlignment : 0;
  if (result) __asan_poison_memory_region(arena.base + arena.used + bytes, size_t(total - bytes));
  arena.used += total;
#else
  arena.used += round_up(bytes, kAlignment);
#endif
  return result;
}

}  // namespace scaledot
