// The measured limits of the machine: the operations and bytes per second of loops that do nothing else.
#pragma once

#include <unistd.h>

#include <cstring>
#include <fstream>
#include <map>
#include <string>

#include "cpu/cpu.h"
#include "peaks/peaks.h"
#include "pool.h"
#include "schedule.h"
#include "work.h"

namespace scaledot::bench {

inline std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  return "unknown";
}

inline bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

// All threads of the pool run a loop at once, so that a percentage on two threads compares with two threads.
class Machine {
 public:
  explicit Machine(Pool& pool) : pool_(pool) {}

  // The loop with the arithmetic of a kernel. nullptr: no loop (the kernels "default" and "reference").
  static const ArithmeticLoop* arithmetic_of(const std::string& kernel, DType dtype) {
#if defined(__x86_64__)
    const bool wide = dtype == DType::float64;
#if defined(SCALEDOT_HAS_AMX)
    if (starts_with(kernel, "amx_bf16")) return &kAmxBfloat16;
#endif
    if (starts_with(kernel, "avx512_bf16") && dtype == DType::bfloat16) return &kAvx512Bfloat16;
    if (starts_with(kernel, "avx512")) return wide ? &kAvx512Double : &kAvx512Float;
    if (starts_with(kernel, "avx2")) return wide ? &kAvx2Double : &kAvx2Float;
#else
    (void)kernel, (void)dtype;
#endif
    return nullptr;
  }

  // The loops that this CPU can run, by cpu_capability().
  static std::vector<const ArithmeticLoop*> arithmetic() {
    std::vector<const ArithmeticLoop*> loops;
#if defined(__x86_64__)
    const Capability level = capability();
#if defined(SCALEDOT_HAS_AMX)
    if (level >= Capability::amx_bf16) loops.push_back(&kAmxBfloat16);
#endif
    if (level >= Capability::avx512_bf16) loops.push_back(&kAvx512Bfloat16);
    if (level >= Capability::avx512) loops.insert(loops.end(), {&kAvx512Float, &kAvx512Double});
    if (level >= Capability::avx2) loops.insert(loops.end(), {&kAvx2Float, &kAvx2Double});
#endif
    return loops;
  }

  // Flops per second.
  double measure(const ArithmeticLoop& loop) {
    int64_t& rounds = rounds_[&loop];
    if (rounds == 0)
      for (rounds = 1024; run(loop, rounds) < kReading;) rounds *= 2;
    const double took = run(loop, rounds);
    return loop.flops_per_round * double(rounds) * pool_.workers() / took;
  }

  // Bytes read per second; 0 if no loop is measured on this machine.
  double read_bandwidth() {
    const ReadLoop* loops = read_loops();
    if (!loops) return 0;
    if (!buffer_) {
      count_ = round_up(buffer_bytes() / int64_t(sizeof(float)), kReadBlock * pool_.workers());
      buffer_ = allocate(count_ * int64_t(sizeof(float)));
      double best = 0;
      for (int k = 0; k < kReadLoops; ++k)
        for (int repeat = 0; repeat < 3; ++repeat) {
          const double rate = read(loops[k]);
          if (rate > best) best = rate, read_loop_ = &loops[k];
        }
    }
    return read(*read_loop_);
  }
  const char* read_loop() const { return read_loop_ ? read_loop_->name : ""; }

 private:
  static constexpr double kReading = 2e-3;  // seconds
  static constexpr int64_t kLeastBuffer = int64_t(256) << 20, kTimesCache = 4;

  static const ReadLoop* read_loops() {
#if defined(__x86_64__)
    if (capability() >= Capability::avx512) return kAvx512Read;
    if (capability() >= Capability::avx2) return kAvx2Read;
#endif
    return nullptr;
  }

  static int64_t buffer_bytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
    return std::max(kLeastBuffer, kTimesCache * int64_t(sysconf(_SC_LEVEL3_CACHE_SIZE)));
#else
    return kLeastBuffer;
#endif
  }

  double run(const ArithmeticLoop& loop, int64_t rounds) {
    const auto begin = Clock::now();
    pool_.everywhere([&](int) { sink_ = loop.run(rounds); });
    return seconds_since(begin);
  }

  double read(const ReadLoop& loop) {
    const int64_t part = count_ / pool_.workers();
    const auto begin = Clock::now();
    pool_.everywhere(
        [&](int worker) { sink_ = loop.run(static_cast<const float*>(buffer_.get()) + worker * part, part); });
    return double(count_) * sizeof(float) / seconds_since(begin);
  }

  Pool& pool_;
  std::map<const ArithmeticLoop*, int64_t> rounds_;
  Memory buffer_;
  int64_t count_ = 0;
  const ReadLoop* read_loop_ = nullptr;
  std::atomic<double> sink_{0};
};

}  // namespace scaledot::bench
