// Loops that measure the limits of the machine: one file per instruction set, compiled with its flags.
#pragma once

#include <cstdint>

namespace scaledot::bench {

// Arithmetic without memory: enough independent chains to hide the latency of an instruction.
struct ArithmeticLoop {
  const char* name;
  double flops_per_round;
  double (*run)(int64_t rounds);  // the result depends on every round, so that the compiler cannot drop any
};

// The sum of `count` floats (a multiple of kReadBlock), read as several streams at once, so that a core waits for
// several lines of memory at a time.
struct ReadLoop {
  const char* name;
  float (*run)(const float* data, int64_t count);
};

constexpr int64_t kReadBlock = int64_t(1) << 18;  // floats: 1 MiB

extern const ArithmeticLoop kAvx2Float, kAvx2Double;
extern const ArithmeticLoop kAvx512Float, kAvx512Double;
extern const ArithmeticLoop kAvx512Bfloat16;
extern const ArithmeticLoop kAmxBfloat16;  // only in a build with SCALEDOT_HAS_AMX
// The best number of streams, and their distance, depend on the machine: the fastest loop counts.
constexpr int kReadLoops = 4;
extern const ReadLoop kAvx2Read[kReadLoops], kAvx512Read[kReadLoops];

}  // namespace scaledot::bench
