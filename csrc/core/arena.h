// A bump allocator over the executor's workspace. A kernel lays its workspace out in one function, which is run twice:
// over nothing, to learn the size (Kernel::workspace), and over the real memory.
#pragma once

#include "core/kernel.h"

namespace scaledot {

struct Arena {
  char* base;    // nullptr: only count
  int64_t used;  // bytes
};

template <class T>
static inline T* take(Arena& arena, int64_t count) {
  T* result = arena.base ? reinterpret_cast<T*>(arena.base + arena.used) : nullptr;
  arena.used += round_up(count * int64_t(sizeof(T)), kAlignment);
  return result;
}

}  // namespace scaledot
