// Narrowing two floats at once, and the hardware's power of two.
#pragma once

#include "core/dispatch.h"
#include "cuda/ptx/device.h"

namespace scaledot {

#if defined(__CUDACC__)

// Both rounded to nearest even, `low` in the low half.
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

// 2^x to 2 units in the last place of float32.
SCALEDOT_DEVICE float fast_exp2(float x) {
  float result;
  asm("ex2.approx.f32 %0, %1;\n" : "=f"(result) : "f"(x));
  return result;
}

#else

template <class Number>
SCALEDOT_DEVICE uint32_t narrow_pair(float low, float high, Type<Number>) {
  Number l, h;
  narrow(low, l);
  narrow(high, h);
  return uint32_t(l.bits) | uint32_t(h.bits) << 16;
}

SCALEDOT_DEVICE float fast_exp2(float x) { return __builtin_exp2f(x); }

#endif

}  // namespace scaledot
