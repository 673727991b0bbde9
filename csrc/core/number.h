// The storage formats: bfloat16 and float16 as bits, widened exactly and narrowed to nearest, ties to even; and those
// of quantised keys and values, which are only read.
#pragma once

#include "core/problem.h"

namespace scaledot {

// Distinct types, for overloads and templates.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
// 4 and 5 bits of exponent (Open Compute Project, "8-bit Floating Point Specification", 2023). E4M3 has no infinity,
// and one NaN of each sign.
struct Float8E4M3 {
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};
struct Int8 {
  int8_t bits;
};

SCALEDOT_FN float float_of_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
SCALEDOT_FN uint32_t bits_of_float(float x) { return __builtin_bit_cast(uint32_t, x); }

SCALEDOT_FN float widen(float x) { return x; }
SCALEDOT_FN double widen(double x) { return x; }
SCALEDOT_FN float widen(BFloat16 x) { return float_of_bits(uint32_t(x.bits) << 16); }
SCALEDOT_FN float widen(Float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));  // inf, NaN
  // The exponent is 112 too small for a float. The product restores it and is exact for subnormals too.
  constexpr float kTwoTo112 = 5192296858534827628530496329220096.0f;
  return float_of_bits(sign | bits_of_float(float_of_bits(magnitude << 13) * kTwoTo112));
}
// The upper half of a float16.
SCALEDOT_FN float widen(Float8E5M2 x) { return widen(Float16{uint16_t(x.bits << 8)}); }
// Moved to where float16 has its bits, a number is kE4M3Power too small. The NaN is no NaN there, but the only one that
// carries into the next bit of the exponent if one is added to its last bit.
constexpr float kE4M3Power = 256.0f;
constexpr int16_t kE4M3Bits = int16_t(0xbf80), kE4M3Last = 0x0080, kE4M3Carry = 0x4000;
SCALEDOT_FN float widen(Float8E4M3 x) {
  const uint32_t sign = x.bits & 0x80u, magnitude = x.bits & 0x7fu;
  const uint32_t bits = magnitude == 0x7fu ? 0x7e00u : magnitude << 7;
  return widen(Float16{uint16_t(sign << 8 | bits)}) * kE4M3Power;
}
SCALEDOT_FN float widen(Int8 x) { return float(x.bits); }

SCALEDOT_FN void narrow(float x, float& out) { out = x; }
SCALEDOT_FN void narrow(double x, double& out) { out = x; }
SCALEDOT_FN void narrow(double x, float& out) { out = float(x); }
SCALEDOT_FN void narrow(float x, BFloat16& out) {
  const uint32_t bits = bits_of_float(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out.bits = uint16_t(x != x ? 0x7fc0u : rounded);
}
SCALEDOT_FN void narrow(float x, Float16& out) {
  const uint32_t bits = bits_of_float(x), sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    out.bits = uint16_t(sign | 0x7e00u);  // NaN
  } else if (magnitude >= 0x477ff000u) {
    out.bits = uint16_t(sign | 0x7c00u);  // rounds to infinity
  } else if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 rounds the mantissa into the low bits.
    out.bits = uint16_t(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u));
  } else {
    magnitude += 0xfffu + ((magnitude >> 13) & 1u) - (uint32_t(112) << 23);
    out.bits = uint16_t(sign | (magnitude >> 13));
  }
}
SCALEDOT_FN void narrow(double x, BFloat16& out) { narrow(float(x), out); }
SCALEDOT_FN void narrow(double x, Float16& out) { narrow(float(x), out); }

// The rounding error of narrowing `exact`, narrowed too; 0 where it is not finite.
template <class T, class Storage>
SCALEDOT_FN Storage output_low_of(T exact, Storage narrowed) {
  const T difference = exact - T(widen(narrowed));
  Storage result{};
  narrow(difference - difference == T(0) ? difference : T(0), result);
  return result;
}

// Element `index` of an array of this dtype, which is not one of 8 bits.
template <class T>
SCALEDOT_FN T load_element(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::float32: return T(static_cast<const float*>(data)[index]);
    case DType::float64: return T(static_cast<const double*>(data)[index]);
    case DType::bfloat16: return T(widen(static_cast<const BFloat16*>(data)[index]));
    case DType::float16: return T(widen(static_cast<const Float16*>(data)[index]));
    case DType::boolean: return T(static_cast<const uint8_t*>(data)[index] != 0);
    default: return T(0);
  }
}

template <class T>
SCALEDOT_FN void store_element(void* data, DType dtype, int64_t index, T x) {
  switch (dtype) {
    case DType::float32: static_cast<float*>(data)[index] = float(x); break;
    case DType::float64: static_cast<double*>(data)[index] = double(x); break;
    case DType::bfloat16: narrow(x, static_cast<BFloat16*>(data)[index]); break;
    case DType::float16: narrow(x, static_cast<Float16*>(data)[index]); break;
    default: break;
  }
}

}  // namespace scaledot
