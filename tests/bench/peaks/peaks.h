// What the machine can do at most, as loops that do nothing else: one file an instruction set, compiled with its flags.
#pragma once

#include <cstdint>

namespace scaledot::bench {

// Arithmetic that needs no memory: independent chains, enough of them to hide the latency of an instruction.
struct ArithmeticLoop {
  const char* name;
  double flops_per_round;
  double (*run)(int64_t rounds);  // returns something that depends on every round, so that none can be left out
};

// The sum of `count` numbers (a multiple of kReadBlock), read as several streams at once: a core that waits for one line of
// memory has others under way.
struct ReadLoop {
  const char* name;
  float (*run)(const float* data, int64_t count);
};

constexpr int64_t kReadBlock = int64_t(1) << 18;  // numbers: 1 MiB

extern const ArithmeticLoop kAvx2Float, kAvx2Double;
extern const ArithmeticLoop kAvx512Float, kAvx512Double;
extern const ArithmeticLoop kAvx512Bfloat16;
// Fewer streams please some machines and more of them others, near each other or far apart: the best of the loops counts.
constexpr int kReadLoops = 4;
extern const ReadLoop kAvx2Read[kReadLoops], kAvx512Read[kReadLoops];

}  // namespace scaledot::bench
