// The default: 16-byte vectors, which every compiler target has (SSE2, NEON, ...). The kernel is called "default".
#pragma once

#include "core/number.h"

namespace scaledot {
namespace {

constexpr int kVectorBytes = 16;
constexpr int kVectorRegisters = 16;  // at least
constexpr bool kFmaRoundsOnce = false;
constexpr bool kHasLdexp = false;  // no instruction for y 2^n

template <class V>
inline V fma(V a, V b, V c) {
  return a * b + c;
}
template <class V>
inline V maximum(V a, V b) {
  return a > b ? a : b;
}

using Floats = float __attribute__((vector_size(kVectorBytes)));
using Doubles = double __attribute__((vector_size(kVectorBytes)));

// Adding 1.5 * 2^(mantissa bits) rounds the fraction away.
inline Floats round_to_integer(Floats x) { return (x + 12582912.0f) - 12582912.0f; }
inline Doubles round_to_integer(Doubles x) { return (x + 6755399441055744.0) - 6755399441055744.0; }
inline bool any_above(Floats x, float limit) { return x[0] > limit || x[1] > limit || x[2] > limit || x[3] > limit; }
inline bool any_above(Doubles x, double limit) { return x[0] > limit || x[1] > limit; }

// 64-bit products of the low 32 bits of each 64-bit lane.
using WideWords = uint64_t __attribute__((vector_size(kVectorBytes)));
inline WideWords multiply_words(WideWords a, WideWords b) { return (a & 0xffffffffu) * (b & 0xffffffffu); }
inline WideWords exclusive_or(WideWords a, WideWords b, WideWords c) { return a ^ b ^ c; }

// One vector of unsigned integers, widened to 32 bits (words) or 64 bits (longs).
template <class Wide, class Narrow>
inline Wide widened(const Narrow* from) {
  Wide x;
  for (int k = 0; k < int(sizeof(Wide) / sizeof(x[0])); ++k) x[k] = from[k];
  return x;
}
using Words = uint32_t __attribute__((vector_size(kVectorBytes)));
inline Words bytes_as_words(const uint8_t* from) { return widened<Words>(from); }
inline WideWords bytes_as_longs(const uint8_t* from) { return widened<WideWords>(from); }
inline Words halves_as_words(const uint16_t* from) { return widened<Words>(from); }
inline WideWords words_as_longs(const uint32_t* from) { return widened<WideWords>(from); }

inline void stream(float* to, Floats x) { *reinterpret_cast<Floats*>(to) = x; }
inline void end_streams() {}

inline Floats widen_halves(const Float16* from) {
  return Floats{widen(from[0]), widen(from[1]), widen(from[2]), widen(from[3])};
}

// One vector of numbers of 8 bits.
template <class Byte>
inline Floats widen_bytes(const Byte* from) {
  return Floats{widen(from[0]), widen(from[1]), widen(from[2]), widen(from[3])};
}
// Widens as above, but divides by kE4M3Power and never yields NaN.
inline Floats widen_small(const Float8E4M3* from) { return widen_bytes(from) * (1 / kE4M3Power); }

inline void narrow_halves(Float16* to, Floats x) {
  for (int k = 0; k < 4; ++k) narrow(x[k], to[k]);
}

}  // namespace
}  // namespace scaledot
