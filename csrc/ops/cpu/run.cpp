#include "ops/cpu/run.h"

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "core/number.h"
#include "core/varlen.h"
#include "ops/cpu/large_pages.h"
#include "ops/cpu/sequence_gradients.h"

namespace scaledot {
namespace {

// Below this many multiply-adds a problem takes less time than waking a second thread does.
constexpr double kSerialWork = 1 << 16;

// OpenMP's threads do not survive a fork, and a child that asks for them waits for ever. In a child the caller runs
// tasks.
std::atomic<bool> threads_started{false}, threads_lost{false};
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] {
  if (threads_started) threads_lost = true;
});
int workers_for(double work) {
  return work < kSerialWork || threads_lost || at::in_parallel_region() ? 1 : at::get_num_threads();
}

double work_of(const Problem& p, int64_t rows, int64_t keys) {
  return double(p.heads) * double(rows) * double(keys) * double(p.head_dim + p.value_dim);
}

// A worker claims the next task when it has finished one, so that unequal tasks (causal masks) balance.
void run_tasks(void* context, int64_t tasks, void (*body)(void* state, int64_t task, int worker), void* state) {
  const int workers = int(min<int64_t>(*static_cast<const int*>(context), tasks));
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

int cpu_workers(const Problem& p) { return workers_for(double(p.batch) * work_of(p, p.query_length, p.key_length)); }

namespace {

void run_one(const Problem& problem, Pass pass) {
  const Kernel& kernel = select(cpu_kernels(), problem, pass);
  int workers = cpu_workers(problem);
  const int64_t bytes = kernel.workspace(problem, pass, workers);
  at::DataPtr memory;
  void* workspace = nullptr;
  if (bytes > 0) {
    memory = c10::GetCPUAllocator()->allocate(size_t(bytes + kAlignment));
    prefer_large_pages(memory.get(), bytes + kAlignment);
    workspace = reinterpret_cast<void*>(round_up(int64_t(reinterpret_cast<uintptr_t>(memory.get())), kAlignment));
  }
  const Executor executor{workers, workspace, &workers, &run_tasks};
  (pass == Pass::forward ? kernel.forward : kernel.backward)(problem, executor);
}

// Sets batch 0 of a tensor to 0, which is all bytes 0 in every dtype. Columns are contiguous in what varlen allocates.
void clear(const Problem& p, const TensorView& view, int64_t heads, int64_t rows, int64_t cols) {
  if (!view.data) return;
  const int64_t size = element_size(view.dtype);
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t row = 0; row < rows; ++row)
      std::memset(element_ptr<char>(p, view, 0, 0) + (head * view.head_stride + row * view.row_stride) * size, 0,
                  size_t(cols * size));
}

// The results of a sequence without rows or keys.
void run_empty(const Problem& p, Pass pass) {
  if (pass == Pass::backward) {
    clear(p, p.grad_query, p.heads, p.query_length, p.head_dim);
    clear(p, p.grad_key, p.kv_heads, p.key_length, p.head_dim);
    clear(p, p.grad_value, p.kv_heads, p.key_length, p.value_dim);
    return;
  }
  clear(p, p.output, p.heads, p.query_length, p.value_dim);
  clear(p, p.output_low, p.heads, p.query_length, p.value_dim);
  for (int64_t head = 0; head < p.heads; ++head)
    for (int64_t row = 0; row < p.query_length; ++row)
      store_element(p.lse.data, p.lse.dtype, head * p.lse.head_stride + row * p.lse.row_stride,
                    -std::numeric_limits<double>::infinity());
}

// Each sequence is a separate call, so its results do not depend on the others.
void run_sequences(const Problem& packed, Pass pass) {
  SequenceGradients gradients(packed);
  gradients.allocate();
  const auto run_sequence = [&](int64_t b) {
    Problem p = sequence(packed, b);
    gradients.place(b, p);
    has_scores(p) ? run_one(p, pass) : run_empty(p, pass);
  };
  SequencePlan plan = plan_sequences(packed);
  const size_t first = plan.with_all_threads;
  for (size_t k = 0; k < first; ++k) run_sequence(plan.order[k]);
  const Executor executor{plan.threads, nullptr, &plan.threads, &run_tasks};
  parallel(executor, int64_t(plan.order.size() - first), [&](int64_t k, int) { run_sequence(plan.order[first + k]); });
  gradients.sum();
}

}  // namespace

// A sequence with at least one thread's share of the remaining work runs with all threads.
SequencePlan plan_sequences(const Problem& packed) {
  std::vector<std::pair<double, int64_t>> by_work;
  double left = 0;
  for (int64_t b = 0; b < packed.batch; ++b) {
    by_work.emplace_back(work_of(packed, query_rows(packed, b).count, key_rows(packed, b).count), b);
    left += by_work.back().first;
  }
  std::sort(by_work.begin(), by_work.end(),
            [](const auto& x, const auto& y) { return x.first != y.first ? x.first > y.first : x.second < y.second; });
  SequencePlan plan{{}, 0, workers_for(left)};
  for (const auto& [work, b] : by_work) {
    // Sorted by work: once one sequence fits a single thread, all later ones do.
    if (plan.with_all_threads == plan.order.size() && work * plan.threads > left) {
      left -= work;
      ++plan.with_all_threads;
    }
    plan.order.push_back(b);
  }
  return plan;
}

void run_cpu(const Problem& problem, Pass pass) {
  is_packed(problem) ? run_sequences(problem, pass) : run_one(problem, pass);
}

}  // namespace scaledot
