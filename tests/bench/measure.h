// Timing: the kernel, the plain case and the limits of the machine take turns. If the machine slows down, all of them
// do, and a percentage is of the limit at the same time.
#pragma once

#include "machine.h"

namespace scaledot::bench {

struct Effort {
  double seconds = 0.5;  // for each case
  int least = 5;         // readings
};

struct Measured {
  Case c;
  std::string kernel;
  int64_t workspace = 0;         // bytes
  std::vector<double> readings;  // seconds a call
  double seconds = 0;            // their median
  double plain = 0;              // seconds of the case without its options; 0: it has none
  const char* peak_name = "";    // "": there is none
  double peak = 0;               // flops per second: the median of readings in turn with the kernel's
  double read_bandwidth = 0;     // bytes per second; 0: not a decode shape

  double rate() const { return flops(c) / seconds; }
  double read_rate() const { return key_value_bytes(c) / seconds; }
};

// A kernel on a case, ready to be called again and again.
class Side {
 public:
  // `work` is the case's; it has to outlive this object.
  Side(const Kernel& kernel, Pass pass, const Work& work, Pool& pool)
      : kernel_(kernel),
        pass_(pass),
        problem_(work.problem()),
        workspace_bytes_(kernel.workspace(problem_, pass, pool.workers())),
        workspace_(allocate(workspace_bytes_)),
        executor_(pool.executor(workspace_.get())) {
    if (pass == Pass::backward) run_forward(pool);
    constexpr double kReading = 2e-3;  // seconds: far more than reading the clock takes
    once(1);
    const double one = once(1);
    calls_ = one >= kReading ? 1 : int(kReading / std::max(one, 1e-7)) + 1;
  }

  void read() { readings_.push_back(once(calls_)); }
  const std::vector<double>& readings() const { return readings_; }
  int64_t workspace_bytes() const { return workspace_bytes_; }

 private:
  // The backward needs output and lse, of any kernel.
  void run_forward(Pool& pool) {
    const Kernel& forward = select(cpu_kernels(), problem_, Pass::forward);
    const Memory memory = allocate(forward.workspace(problem_, Pass::forward, pool.workers()));
    forward.forward(problem_, pool.executor(memory.get()));
  }

  double once(int calls) {
    const auto begin = Clock::now();
    for (int k = 0; k < calls; ++k) run(kernel_, problem_, pass_, executor_);
    return seconds_since(begin) / calls;
  }

  const Kernel& kernel_;
  const Pass pass_;
  const Problem problem_;
  const int64_t workspace_bytes_;
  const Memory workspace_;
  const Executor executor_;
  int calls_ = 1;
  std::vector<double> readings_;
};

inline Measured measure(const Kernel& kernel, const Case& c, const Work& work, Pool& pool, Machine& machine,
                        Effort effort) {
  Side side(kernel, c.pass, work, pool);
  std::unique_ptr<Work> plain_work;
  std::unique_ptr<Side> plain;
  if (!c.options.plain()) {
    Case without = c;
    without.options = {};
    without.options.blhd = c.options.blhd;
    plain_work = std::make_unique<Work>(without);
    const Problem& p = plain_work->problem();
    const Kernel& taking = kernel.why_not(p, c.pass) ? select(cpu_kernels(), p, c.pass) : kernel;
    plain = std::make_unique<Side>(taking, c.pass, *plain_work, pool);
  }
  Measured result;
  result.c = c, result.kernel = kernel.name, result.workspace = side.workspace_bytes();
  const ArithmeticLoop* loop = Machine::arithmetic_of(kernel.name, c.dtype);
  const bool reads = c.shape.decode() && c.pass == Pass::forward;
  std::vector<double> peaks, bandwidths;
  const auto read_limits = [&] {
    if (loop) peaks.push_back(machine.measure(*loop));
    if (reads) bandwidths.push_back(machine.read_bandwidth());
  };
  read_limits();
  for (double spent = 0; spent < effort.seconds || int(side.readings().size()) < effort.least;) {
    const auto begin = Clock::now();
    side.read();
    if (plain) plain->read();
    read_limits();
    spent += seconds_since(begin);
  }
  result.readings = side.readings(), result.seconds = median(result.readings);
  if (plain) result.plain = median(plain->readings());
  if (loop) result.peak_name = loop->name, result.peak = median(peaks);
  result.read_bandwidth = median(bandwidths);
  return result;
}

}  // namespace scaledot::bench
