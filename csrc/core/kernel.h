// Kernel: an entry of the table that selection, tests, benchmarks and explain() walk.
#pragma once

#include "core/problem.h"

namespace scaledot {

enum class Pass : uint8_t { forward, backward };

// Runs the tasks of a CPU kernel: on torch's thread pool in the extension, on plain threads in a test. Results never
// depend on `workers`: a task writes only its own part of the result, and each sum has a fixed order.
struct Executor {
  int workers;      // `worker` below is in [0, workers)
  void* workspace;  // at least Kernel::workspace(problem, pass, workers) bytes, aligned to kAlignment
  void* context;
  // Calls body(state, task, worker) once for every task in [0, tasks), in any order. Returns when all are done.
  void (*run)(void* context, int64_t tasks, void (*body)(void* state, int64_t task, int worker), void* state);
};

constexpr int64_t kAlignment = 64;  // bytes; a cache line and an AVX-512 vector

struct Kernel {
  const char* name;
  // nullptr if the kernel can run this problem on this machine. Otherwise the reason, in one clause.
  const char* (*why_not)(const Problem&, Pass);
  // Bytes of workspace. Computes the kernel's plan (tasks and memory layout). forward and backward compute it again,
  // because that takes less than 0.2 microseconds (measured on a Xeon at 2.5 GHz).
  int64_t (*workspace)(const Problem&, Pass, int workers);
  void (*forward)(const Problem&, const Executor&);
  void (*backward)(const Problem&, const Executor&);
};

struct KernelTable {
  const Kernel* kernels;  // fastest first; the last one takes every problem
  int count;
};

KernelTable cpu_kernels();  // csrc/cpu/kernels.cpp

// The first kernel of the table that takes the problem.
const Kernel& select(KernelTable table, const Problem& problem, Pass pass);

// The capability of this CPU and operating system, or less if SCALEDOT_CPU_CAPABILITY says so: "default", "avx2",
// "avx512", "avx512_bf16" or "amx_bf16" on x86-64, "default", "neon" or "neon_bf16" on ARM64.
const char* cpu_capability();
// These names in order, "default" for 0; nullptr after the last of this architecture.
const char* cpu_capability_name(int level);

// Tests only: select() takes the kernel of this name first, unless it cannot run the problem. nullptr: the table's
// order again. Returns false if no kernel has the name.
bool force_kernel(const char* name);

// Calls body(task, worker) for every task in [0, tasks).
template <class Body>
static inline void parallel(const Executor& executor, int64_t tasks, const Body& body) {
  executor.run(
      executor.context, tasks,
      [](void* state, int64_t task, int worker) { (*static_cast<const Body*>(state))(task, worker); },
      const_cast<Body*>(&body));
}

}  // namespace scaledot
