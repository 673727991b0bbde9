// Narrowing of pairs, the hardware's exp2 and maximum, and sums that the compiler must not fuse.
#pragma once

#include "core/dispatch.h"
#include "cuda/ptx/device.h"

namespace scaledot {

#if defined(__CUDACC__)

// Two floats rounded to nearest even, `low` in the low half.
SCALEDOT_DEVICE uint32_t narrow_pair(float low, float high, Type<BFloat16>) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
SCALEDOT_DEVICE uint32_t narrow_pair(float low, float high, Type<Float16>) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// 2^x, to 2 units in the last place of float32.
SCALEDOT_DEVICE float fast_exp2(float x) {
  float result;
  asm("ex2.approx.f32 %0, %1;\n" : "=f"(result) : "f"(x));
  return result;
}
// The same in one instruction instead of four. Results below the smallest normal number, 2^-126, are 0.
SCALEDOT_DEVICE float flushed_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
  return result;
}
// The larger number, in one instruction. A NaN counts as no number.
SCALEDOT_DEVICE float fast_max(float a, float b) { return fmaxf(a, b); }

// A sum that is never fused with a product. The compiler may compute x * y - z without rounding x * y. If z is that
// same product, rounded and large, the difference would no longer be 0.
SCALEDOT_DEVICE float rounded_add(float a, float b) { return __fadd_rn(a, b); }
SCALEDOT_DEVICE double rounded_add(double a, double b) { return __dadd_rn(a, b); }
SCALEDOT_DEVICE float rounded_subtract(float a, float b) { return __fsub_rn(a, b); }
SCALEDOT_DEVICE double rounded_subtract(double a, double b) { return __dsub_rn(a, b); }
// a b + c with a single rounding.
SCALEDOT_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }

#else

SCALEDOT_DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

template <class T>
SCALEDOT_DEVICE T rounded_add(T a, T b) {
  return a + b;
}
template <class T>
SCALEDOT_DEVICE T rounded_subtract(T a, T b) {
  return a - b;
}

template <class Number>
SCALEDOT_DEVICE uint32_t narrow_pair(float low, float high, Type<Number>) {
  Number l, h;
  narrow(low, l);
  narrow(high, h);
  return uint32_t(l.bits) | uint32_t(h.bits) << 16;
}

SCALEDOT_DEVICE float fast_exp2(float x) { return __builtin_exp2f(x); }
SCALEDOT_DEVICE float flushed_exp2(float x) {
  const float result = __builtin_exp2f(x);
  return result < 0x1p-126f ? 0.0f : result;
}
SCALEDOT_DEVICE float fast_max(float a, float b) { return __builtin_fmaxf(a, b); }

#endif

}  // namespace scaledot
