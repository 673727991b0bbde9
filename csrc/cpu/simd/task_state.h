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
  void begin(const Problem& p) {
    before_ = __builtin_ia32_stmxcsr();
    changes_ = (before_ & kFlushToZero) == 0 && has_usual_scale(p);
    if (changes_) __builtin_ia32_ldmxcsr(before_ | kFlushToZero);
  }
  void end() const {
    if (changes_) __builtin_ia32_ldmxcsr(before_);
  }

 private:
  static constexpr unsigned kFlushToZero = 1u << 15;
  static constexpr double kLeastScale = 0x1p-64;

  // The gradients of query and key have the scale as a factor. A tiny one makes all of them subnormal.
  static bool has_usual_scale(const Problem& p) { return p.scale >= kLeastScale || p.scale <= -kLeastScale; }

  unsigned before_ = 0;
  bool changes_ = false;  // a change takes over 100 cycles
#else
 public:
  void begin(const Problem&) {}
  void end() const {}
#endif
};

// Runs the tasks of another executor, each between begin() and end() of a State. Tasks throw nothing. A destructor in
// place of end() would define a symbol for exceptions in every instruction set's file.
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
      State during_the_task;
      during_the_task.begin(inner.problem);
      inner.body(inner.state, task, worker);
      during_the_task.end();
    }
  };

  const Problem& problem_;
  const Executor& inner_;
};

// A pass of a kernel whose tasks run in a State. With one worker the whole pass flushes, so its tasks find nothing to
// change. With more, a thread that the pass starts would inherit the setting, and keep it.
template <void (*kPass)(const Problem&, const Executor&), class State = FlushSubnormals>
void with_state(const Problem& p, const Executor& executor) {
  const bool alone = executor.workers == 1;
  FlushSubnormals in_this_thread;
  if (alone) in_this_thread.begin(p);
  const ExecutorWith<State> with(p, executor);
  kPass(p, with.executor());
  if (alone) in_this_thread.end();
}

}  // namespace
}  // namespace scaledot
