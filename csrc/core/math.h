// Elementary functions of scalars, under the names that vectors have too (csrc/cpu/simd/vec.h). Not constexpr: only
// some compilers have constexpr builtins.
#pragma once

#include "core/problem.h"

// glibc 2.29 has exp, log and pow that no longer set errno, under the same names; glibc 2.38 has such an fmod. The
// older ones compute the same bits, and with them the library loads on older systems too; see ops/compat.cpp. Elsewhere
// there is only one version.
#if defined(__x86_64__) && defined(__LP64__) && defined(__GLIBC__) && !defined(__CUDACC__)
__asm__(".symver exp, exp@GLIBC_2.2.5");
__asm__(".symver log, log@GLIBC_2.2.5");
__asm__(".symver pow, pow@GLIBC_2.2.5");
__asm__(".symver fmod, fmod@GLIBC_2.2.5");
__asm__(".symver fmodf, fmodf@GLIBC_2.2.5");
#endif

namespace scaledot {

constexpr double kLog2e = 1.4426950408889634074;  // log2(e): exp(x) = 2^(x * kLog2e)

SCALEDOT_HOST_DEVICE static inline float exp(float x) { return __builtin_expf(x); }
SCALEDOT_HOST_DEVICE static inline double exp(double x) { return __builtin_exp(x); }
SCALEDOT_HOST_DEVICE static inline float log(float x) { return __builtin_logf(x); }
SCALEDOT_HOST_DEVICE static inline double log(double x) { return __builtin_log(x); }
SCALEDOT_HOST_DEVICE static inline float tanh(float x) { return __builtin_tanhf(x); }
SCALEDOT_HOST_DEVICE static inline double tanh(double x) { return __builtin_tanh(x); }

}  // namespace scaledot
