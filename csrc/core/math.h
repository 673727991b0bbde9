// The elementary functions of numbers, under the names that vector types use too (csrc/cpu/simd/vec.h). Not constexpr: the
// builtins are so in some compilers only.
#pragma once

#include "core/problem.h"

namespace scaledot {

constexpr double kLog2e = 1.4426950408889634074;  // log2(e): exp(x) = 2^(x * kLog2e)

SCALEDOT_HOST_DEVICE static inline float exp(float x) { return __builtin_expf(x); }
SCALEDOT_HOST_DEVICE static inline double exp(double x) { return __builtin_exp(x); }
SCALEDOT_HOST_DEVICE static inline float log(float x) { return __builtin_logf(x); }
SCALEDOT_HOST_DEVICE static inline double log(double x) { return __builtin_log(x); }
SCALEDOT_HOST_DEVICE static inline float tanh(float x) { return __builtin_tanhf(x); }
SCALEDOT_HOST_DEVICE static inline double tanh(double x) { return __builtin_tanh(x); }

}  // namespace scaledot
