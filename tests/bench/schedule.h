// How the tasks of a kernel would share N cores: every task is timed on one core, then a run on N cores is simulated.
// Not simulated: cores compete for memory and cache, and wake up late.
#pragma once

#include <algorithm>
#include <chrono>
#include <numeric>
#include <vector>

#include "core/kernel.h"

namespace scaledot::bench {

using Clock = std::chrono::steady_clock;
inline double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

using Phase = std::vector<double>;  // seconds of each task of one Executor::run, in the order of the tasks

struct Recording {
  std::vector<Phase> phases;
  double serial = 0;  // seconds outside of all phases: one core works, the others wait
};

// An executor that runs the tasks one by one and records the time of each. `workers` is the number that the kernel
// sees.
class Recorder {
 public:
  Executor executor(int workers, void* workspace) { return {workers, workspace, this, &Recorder::run}; }

  template <class Body>
  Recording record(const Body& body) {
    recording_ = {};
    in_phases_ = 0;
    const auto begin = Clock::now();
    body();
    recording_.serial = std::max(seconds_since(begin) - in_phases_, 0.0);
    return recording_;
  }

 private:
  static void run(void* self, int64_t tasks, void (*body)(void* state, int64_t task, int worker), void* state) {
    Recorder& recorder = *static_cast<Recorder*>(self);
    Phase& phase = recorder.recording_.phases.emplace_back();
    phase.reserve(size_t(tasks));
    const auto start = Clock::now();
    for (int64_t task = 0; task < tasks; ++task) {
      const auto begin = Clock::now();
      body(state, task, 0);
      phase.push_back(seconds_since(begin));
    }
    recorder.in_phases_ += seconds_since(start);  // reading the clock is not the kernel's work
  }

  Recording recording_;
  double in_phases_ = 0;
};

// For each task, the median of several recordings of the same run.
inline Recording median_of(const std::vector<Recording>& runs) {
  Recording result = runs.front();
  const auto middle = [&](const auto& value_of) {
    std::vector<double> values;
    for (const Recording& run : runs) values.push_back(value_of(run));
    return median(values);
  };
  for (size_t k = 0; k < result.phases.size(); ++k)
    for (size_t task = 0; task < result.phases[k].size(); ++task)
      result.phases[k][task] = middle([&](const Recording& run) { return run.phases[k][task]; });
  result.serial = middle([](const Recording& run) { return run.serial; });
  return result;
}

// The executors' rule: the first free core takes the next task, and all cores meet at the end of the phase. Adds the
// time that each core works to `busy`, whose size is the number of cores. Returns the time of the phase.
inline double simulate(const Phase& phase, std::vector<double>& busy) {
  std::vector<double> free_at(busy.size(), 0.0);
  for (double task : phase) {
    const size_t core = size_t(std::min_element(free_at.begin(), free_at.end()) - free_at.begin());
    free_at[core] += task;
    busy[core] += task;
  }
  return *std::max_element(free_at.begin(), free_at.end());
}

struct PhaseShare {
  int64_t tasks;
  double longest, span, busy;  // seconds, seconds, and the share of cores x span that is work
};

struct Schedule {
  double span = 0;   // seconds of the whole run
  double idle = 0;   // share of cores x span in which a core waits
  double worst = 0;  // the same of the core that waits most
  std::vector<PhaseShare> phases;
};

inline Schedule simulate(const Recording& recording, int cores) {
  Schedule result;
  std::vector<double> busy(size_t(cores), 0.0);
  busy[0] = result.span = recording.serial;
  for (const Phase& phase : recording.phases) {
    const double span = simulate(phase, busy);
    const double work = std::accumulate(phase.begin(), phase.end(), 0.0);
    const double longest = phase.empty() ? 0 : *std::max_element(phase.begin(), phase.end());
    result.phases.push_back({int64_t(phase.size()), longest, span, span > 0 ? work / (span * cores) : 1});
    result.span += span;
  }
  if (result.span <= 0) return result;
  const double all = std::accumulate(busy.begin(), busy.end(), 0.0);
  result.idle = std::max(1 - all / (result.span * cores), 0.0);  // sums of the same tasks round differently
  result.worst = std::max(1 - *std::min_element(busy.begin(), busy.end()) / result.span, 0.0);
  return result;
}

}  // namespace scaledot::bench
