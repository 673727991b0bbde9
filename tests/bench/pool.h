// An executor on plain threads, which live from call to call as torch's do.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "core/kernel.h"

namespace scaledot::bench {

class Pool {
 public:
  explicit Pool(int workers) : workers_(workers) {
    for (int worker = 1; worker < workers; ++worker) threads_.emplace_back([this, worker] { serve(worker); });
  }
  ~Pool() {
    work_ = nullptr;
    start();
    for (std::thread& thread : threads_) thread.join();
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int workers() const { return workers_; }

  Executor executor(void* workspace) { return {workers_, workspace, this, &Pool::run_tasks}; }

  // Calls work(worker) on every thread at once. Returns when all are done.
  void everywhere(const std::function<void(int)>& work) {
    work_ = &work;
    pending_ = workers_ - 1;
    start();
    work(0);
    for (int left = pending_; left > 0; left = pending_) pending_.wait(left);
  }

 private:
  static void run_tasks(void* self, int64_t tasks, void (*body)(void* state, int64_t task, int worker), void* state) {
    Pool& pool = *static_cast<Pool*>(self);
    if (pool.workers_ == 1 || tasks == 1) {
      for (int64_t task = 0; task < tasks; ++task) body(state, task, 0);
      return;
    }
    std::atomic<int64_t> next{0};
    pool.everywhere([&](int worker) {
      for (int64_t task = next++; task < tasks; task = next++) body(state, task, worker);
    });
  }

  void start() {
    ++round_;
    round_.notify_all();
  }

  void serve(int worker) {
    for (int seen = 0;; ++seen) {
      while (round_ == seen) round_.wait(seen);  // spins for a while before it sleeps
      if (!work_) return;
      (*work_)(worker);
      if (--pending_ == 0) pending_.notify_one();
    }
  }

  const int workers_;
  const std::function<void(int)>* work_ = nullptr;
  std::atomic<int> round_{0}, pending_{0};
  std::vector<std::thread> threads_;
};

}  // namespace scaledot::bench
