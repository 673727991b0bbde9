#include "ops/run_cpu.h"

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <atomic>

namespace scaledot {
namespace {

// Below this many multiply-adds a problem takes less time than waking a second thread does.
constexpr double kSerialWork = 1 << 16;

// OpenMP's threads do not survive a fork, and the child that asks for them waits for ever: there, tasks are run by the caller.
std::atomic<bool> threads_started{false}, threads_lost{false};
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] {
  if (threads_started) threads_lost = true;
});

// Workers claim the next task when they are done with one, so that unequal tasks (causal masks) balance.
void run_tasks(void* context, int64_t tasks, void (*body)(void* state, int64_t task, int worker), void* state) {
  const int workers = int(smaller<int64_t>(*static_cast<const int*>(context), tasks));
  if (workers <= 1) {
    for (int64_t task = 0; task < tasks; ++task) body(state, task, 0);
    return;
  }
  threads_started = true;
  std::atomic<int64_t> next{0};
  at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      int64_t task;
      while ((task = next.fetch_add(1, std::memory_order_relaxed)) < tasks) body(state, task, int(worker));
    }
  });
}

}  // namespace

int cpu_workers(const Problem& p) {
  const double work = double(p.batch) * double(p.heads) * double(p.query_length) * double(p.key_length) *
                      double(p.head_dim + p.value_dim);
  return work < kSerialWork || threads_lost || at::in_parallel_region() ? 1 : at::get_num_threads();
}

void run_cpu(const Problem& problem, Pass pass) {
  const Kernel& kernel = select(cpu_kernels(), problem, pass);
  int workers = cpu_workers(problem);
  const int64_t bytes = kernel.workspace(problem, pass, workers);
  at::DataPtr memory;
  void* workspace = nullptr;
  if (bytes > 0) {
    memory = c10::GetCPUAllocator()->allocate(size_t(bytes + kAlignment));
    workspace = reinterpret_cast<void*>(round_up(int64_t(reinterpret_cast<uintptr_t>(memory.get())), kAlignment));
  }
  const Executor executor{workers, workspace, &workers, &run_tasks};
  (pass == Pass::forward ? kernel.forward : kernel.backward)(problem, executor);
}

}  // namespace scaledot
