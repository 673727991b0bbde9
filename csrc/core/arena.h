// A bump allocator over the executor's workspace. A kernel lays out its workspace in one function, which runs twice:
// without memory, to count the bytes (Kernel::workspace), and with it.
#pragma once

#include "core/kernel.h"

namespace scaledot {

struct Arena {
  char* base;    // nullptr: only count bytes
  int64_t used;  // bytes
};

template <class T>
static inline T* take(Arena& arena, int64_t count) {
  T* result = arena.base ? reinterpret_cast<T*>(arena.base + arena.used) : nullptr;
  arena.used += round_up(count * int64_t(sizeof(T)), kAlignment);
  return result;
}

}  // namespace scaledot
