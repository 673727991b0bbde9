// Conversions of pairs and bytes, the hardware's exp2 and maximum, and sums that the compiler must not fuse.
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

// Both halves of a pair of float16.
SCALEDOT_DEVICE void widen_pair(uint32_t pair, float& low, float& high) {
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n"
      "}\n"
      : "=f"(low), "=f"(high)
      : "r"(pair));
}
// a b + c of pairs of numbers, each with a single rounding.
SCALEDOT_DEVICE uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c, Type<Float16>) {
  uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
SCALEDOT_DEVICE uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c, Type<BFloat16>) {
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
// Four bytes of a and b: a has the numbers 0 to 3, b 4 to 7. Hexadecimal digit k of `selector`, from the right, is the
// number of byte k of the result.
SCALEDOT_DEVICE uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }

// Two numbers of float8_e4m3 as two of float16, in one instruction, which GPUs have from compute capability 8.9 on.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr bool kWidensE4M3 = true;
SCALEDOT_DEVICE uint32_t widen_e4m3(uint16_t two) {
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(pair) : "h"(two));
  return pair;
}
#else
constexpr bool kWidensE4M3 = false;
SCALEDOT_DEVICE uint32_t widen_e4m3(uint16_t) { return 0; }
#endif

// 2^x, to 2 units in the last place of float32.
SCALEDOT_DEVICE float fast_exp2(float x) {
  float result;
  asm("ex2.approx.f32 %0, %1;\n" : "=f"(result) : "f"(x));
  return result;
}
// 2^x in one instruction instead of four. Results below the smallest normal number, 2^-126, are 0.
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

SCALEDOT_DEVICE void widen_pair(uint32_t pair, float& low, float& high) {
  low = widen(Float16{uint16_t(pair)}), high = widen(Float16{uint16_t(pair >> 16)});
}
template <class Number>
SCALEDOT_DEVICE uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c, Type<Number> type) {
  const auto fused = [&](int shift) {
    const auto number = [shift](uint32_t pair) { return double(widen(Number{uint16_t(pair >> shift)})); };
    return float(number(a) * number(b) + number(c));
  };
  return narrow_pair(fused(0), fused(16), type);
}
SCALEDOT_DEVICE uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int k = 0; k < 4; ++k) result |= uint32_t(bytes >> 8 * (selector >> 4 * k & 7) & 0xff) << 8 * k;
  return result;
}

constexpr bool kWidensE4M3 = true;
SCALEDOT_DEVICE uint32_t widen_e4m3(uint16_t two) {
  const auto number = [&](int byte) { return widen(__builtin_bit_cast(Float8E4M3, uint8_t(two >> 8 * byte))); };
  return narrow_pair(number(0), number(1), Type<Float16>{});
}

SCALEDOT_DEVICE float fast_exp2(float x) { return __builtin_exp2f(x); }
SCALEDOT_DEVICE float flushed_exp2(float x) {
  const float result = __builtin_exp2f(x);
  return result < 0x1p-126f ? 0.0f : result;
}
SCALEDOT_DEVICE float fast_max(float a, float b) { return __builtin_fmaxf(a, b); }

#endif

SCALEDOT_DEVICE void widen_pair(uint32_t pair, float& low, float& high, Type<BFloat16>) {
  low = float_of_bits(pair << 16), high = float_of_bits(pair & 0xffff0000u);
}
SCALEDOT_DEVICE void widen_pair(uint32_t pair, float& low, float& high, Type<Float16>) { widen_pair(pair, low, high); }

}  // namespace scaledot
