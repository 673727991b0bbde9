// The elementary functions of numbers, under the names that vector types use too (csrc/cpu/simd/vec.h).
#pragma once

#include "core/problem.h"

namespace scaledot {

SCALEDOT_FN float exp(float x) { return __builtin_expf(x); }
SCALEDOT_FN double exp(double x) { return __builtin_exp(x); }
SCALEDOT_FN float log(float x) { return __builtin_logf(x); }
SCALEDOT_FN double log(double x) { return __builtin_log(x); }
SCALEDOT_FN float tanh(float x) { return __builtin_tanhf(x); }
SCALEDOT_FN double tanh(double x) { return __builtin_tanh(x); }

}  // namespace scaledot
