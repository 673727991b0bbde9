// Runs kernels without torch: on plain threads, with a workspace that is full of NaN and guarded at its end.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/kernel.h"

namespace scaledot::testing {

// Runs one pass of a kernel on `workers` threads. Throws if the kernel wrote past the workspace it asked for.
inline void run(const Kernel& kernel, const Problem& problem, Pass pass, int workers = 1) {
  constexpr uint8_t kPoison = 0xff;
  constexpr int64_t kGuard = 4096;
  const int64_t bytes = kernel.workspace(problem, pass, workers);
  const int64_t total = round_up(bytes + kGuard, kAlignment);
  const std::unique_ptr<uint8_t, decltype(&std::free)> memory(
      static_cast<uint8_t*>(std::aligned_alloc(size_t(kAlignment), size_t(total))), &std::free);
  std::memset(memory.get(), kPoison, size_t(total));

  const auto run_tasks = [](void* context, int64_t tasks, void (*body)(void*, int64_t, int), void* state) {
    const int threads = *static_cast<int*>(context);
    std::atomic<int64_t> next{0};
    const auto work = [&](int worker) {
      for (int64_t task = next++; task < tasks; task = next++) body(state, task, worker);
    };
    std::vector<std::thread> others;
    for (int worker = 1; worker < threads; ++worker) others.emplace_back(work, worker);
    work(0);
    for (std::thread& thread : others) thread.join();
  };
  const Executor executor = {workers, memory.get(), &workers, run_tasks};
  (pass == Pass::forward ? kernel.forward : kernel.backward)(problem, executor);
  for (int64_t k = bytes; k < total; ++k)
    if (memory.get()[k] != kPoison) throw std::runtime_error("the kernel wrote past the end of its workspace");
}

}  // namespace scaledot::testing
