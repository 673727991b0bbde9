// Runs kernels without torch, with a workspace that is full of NaN and guarded at its end.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/kernel.h"
#include "random.h"
#include "red_zones.h"

namespace scaledot::testing {

// Workspaces made one after the other get the same memory, up to kMostKept bytes: fresh memory would be page-faulted
// each time.
class Workspace {
 public:
  explicit Workspace(int64_t bytes) : bytes_(bytes), total_(round_up(bytes + kGuard, kAlignment)) {
    kept().total >= total_ ? std::swap(memory_, kept()) : (void)(memory_ = Memory(total_));
    std::memset(data(), kPoison, size_t(total_));
  }
  Workspace(const Workspace&) = delete;
  ~Workspace() {
    RedZones::open(data(), size_t(memory_.total));  // kernels put red zones between their arrays
    if (memory_.total <= kMostKept) std::swap(memory_, kept());
  }

  uint8_t* data() const { return memory_.bytes.get(); }
  void add_guard(RedZones& zones) const { zones.add(data() + bytes_, size_t(memory_.total - bytes_)); }
  // Throws if the kernel wrote past the workspace it asked for.
  void check_guard() const {
    for (int64_t k = bytes_; k < total_; ++k)
      if (data()[k] != kPoison) throw std::runtime_error("the kernel wrote past the end of its workspace");
  }

 private:
  static constexpr uint8_t kPoison = 0xff;
  static constexpr int64_t kGuard = 4096;
  static constexpr int64_t kMostKept = int64_t(32) << 20;

  struct Memory {
    Memory() = default;
    explicit Memory(int64_t size)
        : total(size), bytes(static_cast<uint8_t*>(std::aligned_alloc(size_t(kAlignment), size_t(size))), &std::free) {}

    int64_t total = 0;
    std::unique_ptr<uint8_t, decltype(&std::free)> bytes{nullptr, &std::free};
  };
  // The memory for the next workspace of this thread.
  static Memory& kept() {
    static thread_local Memory memory;
    return memory;
  }

  const int64_t bytes_, total_;
  Memory memory_;
};

// The members of an Executor that run its tasks.
using RunTasks = decltype(Executor::run);

inline void run(const Kernel& kernel, const Problem& problem, Pass pass, int workers, void* context, RunTasks tasks) {
  const Workspace workspace(kernel.workspace(problem, pass, workers));
  {
    RedZones zones;
    workspace.add_guard(zones);
    const Executor executor = {workers, workspace.data(), context, tasks};
    (pass == Pass::forward ? kernel.forward : kernel.backward)(problem, executor);
  }
  workspace.check_guard();
}

// Runs one pass of a kernel on `workers` threads.
inline void run(const Kernel& kernel, const Problem& problem, Pass pass, int workers = 1) {
  run(kernel, problem, pass, workers, &workers,
      [](void* context, int64_t tasks, void (*body)(void*, int64_t, int), void* state) {
        const int threads = *static_cast<int*>(context);
        std::atomic<int64_t> next{0};
        const auto work = [&](int worker) {
          for (int64_t task = next++; task < tasks; task = next++) body(state, task, worker);
        };
        std::vector<std::thread> others;
        for (int worker = 1; worker < threads; ++worker) others.emplace_back(work, worker);
        work(0);
        for (std::thread& thread : others) thread.join();
      });
}

// One thread plays all workers: every task runs on a random one, and in random order.
inline void run_shuffled(const Kernel& kernel, const Problem& problem, Pass pass, int workers, uint64_t seed) {
  struct Shuffle {
    int workers;
    Random random;
  } shuffle = {workers, Random(seed)};
  run(kernel, problem, pass, workers, &shuffle,
      [](void* context, int64_t tasks, void (*body)(void*, int64_t, int), void* state) {
        Shuffle& shuffle = *static_cast<Shuffle*>(context);
        std::vector<int64_t> order(static_cast<size_t>(tasks));
        std::iota(order.begin(), order.end(), 0);
        for (size_t k = order.size(); k > 1; --k) std::swap(order[k - 1], order[size_t(shuffle.random.bits() % k)]);
        for (int64_t task : order) body(state, task, int(shuffle.random.bits() % uint64_t(shuffle.workers)));
      });
}

}  // namespace scaledot::testing
