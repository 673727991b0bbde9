// The state of the CPU that a kernel's tasks need: set before each task on the task's thread, and reset after it.
#pragma once

#include "core/kernel.h"

namespace scaledot {
namespace {

// Results below the smallest normal number become 0. Intel's cores take over 100 cycles for an addition or a product
// with such a result. They are common where weights decay over hundreds of keys: in the first keys of a tile,
// P V is below 1e-38. (ALiBi's slopes for 8 heads, 2,048 keys of 64 columns, float32: the backward took 1.23 times as
// long. Intel Xeon with AMX.) Inputs below it stay as they are. ARM's cores compute with them at full speed.
class FlushSubnormals {
#if defined(__x86_64__)
 public:
  explicit FlushSubnormals(const Problem& p)
      : before_(__builtin_ia32_stmxcsr()), changes_((before_ & kFlushToZero) == 0 && has_usual_scale(p)) {
    if (changes_) __builtin_ia32_ldmxcsr(before_ | kFlushToZero);
  }
  ~FlushSubnormals() {
    if (changes_) __builtin_ia32_ldmxcsr(before_);
  }
  FlushSubnormals(const FlushSubnormals&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 1u << 15;
  static constexpr double kLeastScale = 0x1p-64;

  // The gradients of query and key have the scale as a factor. A tiny one makes all of them subnormal.
  static bool has_usual_scale(const Problem& p) { return p.scale >= kLeastScale || p.scale <= -kLeastScale; }

  unsigned before_;
  bool changes_;  // a change takes over 100 cycles
#else
 public:
  explicit FlushSubnormals(const Problem&) {}
#endif
};

// Runs the tasks of another executor, each during the life of a State of the problem.
template <class State>
class ExecutorWith {
 public:
  ExecutorWith(const Problem& p, const Executor& inner) : problem_(p), inner_(inner) {}
  ExecutorWith(const ExecutorWith&) = delete;

  Executor executor() const {
    return {inner_.workers, inner_.workspace, const_cast<ExecutorWith*>(this),
            [](void* self, int64_t tasks, Body body, void* state) {
              const ExecutorWith& with = *static_cast<const ExecutorWith*>(self);
              const Task task = {body, state, with.problem_};
              const Executor& inner = with.inner_;
              inner.run(inner.context, tasks, &Task::run, const_cast<Task*>(&task));
            }};
  }

 private:
  using Body = void (*)(void* state, int64_t task, int worker);
  struct Task {
    Body body;
    void* state;
    const Problem& problem;

    static void run(void* self, int64_t task, int worker) {
      const Task& inner = *static_cast<const Task*>(self);
      const State during_the_task(inner.problem);
      inner.body(inner.state, task, worker);
    }
  };

  const Problem& problem_;
  const Executor& inner_;
};

// A pass of a kernel whose tasks run during the life of a State. The calling thread flushes during the whole pass, so
// its tasks find nothing to change.
template <void (*kPass)(const Problem&, const Executor&), class State = FlushSubnormals>
void with_state(const Problem& p, const Executor& executor) {
  const FlushSubnormals in_this_thread(p);
  const ExecutorWith<State> with(p, executor);
  kPass(p, with.executor());
}

}  // namespace
}  // namespace scaledot
