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
  FlushSubnormals() : before_(__builtin_ia32_stmxcsr()) {
    if (changes()) __builtin_ia32_ldmxcsr(before_ | kFlushToZero);
  }
  ~FlushSubnormals() {
    if (changes()) __builtin_ia32_ldmxcsr(before_);
  }
  FlushSubnormals(const FlushSubnormals&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 1u << 15;
  bool changes() const { return (before_ & kFlushToZero) == 0; }  // a change takes over 100 cycles

  unsigned before_;
#endif
};

// Runs the tasks of another executor, each during the life of a State.
template <class State>
class ExecutorWith {
 public:
  explicit ExecutorWith(const Executor& inner) : inner_(inner) {}
  ExecutorWith(const ExecutorWith&) = delete;

  Executor executor() const {
    return {inner_.workers, inner_.workspace, const_cast<ExecutorWith*>(this),
            [](void* self, int64_t tasks, Body body, void* state) {
              const Task task = {body, state};
              const Executor& inner = static_cast<const ExecutorWith*>(self)->inner_;
              inner.run(inner.context, tasks, &Task::run, const_cast<Task*>(&task));
            }};
  }

 private:
  using Body = void (*)(void* state, int64_t task, int worker);
  struct Task {
    Body body;
    void* state;

    static void run(void* self, int64_t task, int worker) {
      const Task& inner = *static_cast<const Task*>(self);
      [[maybe_unused]] const State during_the_task;
      inner.body(inner.state, task, worker);
    }
  };

  const Executor& inner_;
};

// A pass of a kernel whose tasks run during the life of a State. The calling thread flushes during the whole pass, so
// its tasks find nothing to change.
template <void (*kPass)(const Problem&, const Executor&), class State = FlushSubnormals>
void with_state(const Problem& p, const Executor& executor) {
  [[maybe_unused]] const FlushSubnormals in_this_thread;
  const ExecutorWith<State> with(executor);
  kPass(p, with.executor());
}

}  // namespace
}  // namespace scaledot
