// 16-byte vectors of ARM64: NEON (Advanced SIMD), which every ARM64 CPU has.
#pragma once

#include <arm_neon.h>

#include "core/number.h"

namespace scaledot {
namespace {

constexpr int kVectorBytes = 16;
constexpr int kVectorRegisters = 32;
constexpr bool kFmaRoundsOnce = true;
constexpr bool kHasLdexp = false;  // no instruction for y 2^n

using Floats = float __attribute__((vector_size(kVectorBytes)));
using Doubles = double __attribute__((vector_size(kVectorBytes)));

inline Floats fma(Floats a, Floats b, Floats c) { return Floats(vfmaq_f32(float32x4_t(c), a, b)); }
inline Doubles fma(Doubles a, Doubles b, Doubles c) { return Doubles(vfmaq_f64(float64x2_t(c), a, b)); }
// Not fmax or fmaxnm: the former keeps a NaN in a, the latter drops one in b.
template <class V>
inline V maximum(V a, V b) {
  return a > b ? a : b;
}

inline Floats round_to_integer(Floats x) { return Floats(vrndnq_f32(x)); }
inline Doubles round_to_integer(Doubles x) { return Doubles(vrndnq_f64(x)); }
inline bool any_above(Floats x, float limit) { return vmaxvq_u32(vcgtq_f32(x, vdupq_n_f32(limit))) != 0; }
inline bool any_above(Doubles x, double limit) {
  return vmaxvq_u32(vreinterpretq_u32_u64(vcgtq_f64(x, vdupq_n_f64(limit)))) != 0;
}

// 64-bit products of the low 32 bits of each 64-bit lane.
using WideWords = uint64_t __attribute__((vector_size(kVectorBytes)));
inline WideWords multiply_words(WideWords a, WideWords b) { return WideWords(vmull_u32(vmovn_u64(a), vmovn_u64(b))); }
inline WideWords exclusive_or(WideWords a, WideWords b, WideWords c) { return a ^ b ^ c; }

// The bytes of one vector of words, in the low half.
inline uint8x8_t load_bytes(const void* from) {
  uint32_t bytes;
  __builtin_memcpy(&bytes, from, sizeof(bytes));
  return vcreate_u8(bytes);
}

// One vector of unsigned integers, widened to 32 bits (words) or 64 bits (longs).
inline uint32x4_t halves_as_words(const uint16_t* from) { return vmovl_u16(vld1_u16(from)); }
inline uint32x4_t bytes_as_words(const uint8_t* from) { return vmovl_u16(vget_low_u16(vmovl_u8(load_bytes(from)))); }
inline uint64x2_t bytes_as_longs(const uint8_t* from) { return uint64x2_t{from[0], from[1]}; }
inline uint64x2_t words_as_longs(const uint32_t* from) { return vmovl_u32(vld1_u32(from)); }

inline void stream(float* to, Floats x) { vst1q_f32(to, x); }
inline void end_streams() {}

inline Floats widen_halves(const Float16* from) {
  return Floats(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits))));
}

// One vector of numbers of 8 bits. Those of floating point are first moved to where float16 has them.
inline Floats widen_bits(int16x8_t halves) { return Floats(vcvt_f32_f16(vreinterpret_f16_s16(vget_low_s16(halves)))); }
inline Floats widen_bytes(const Int8* from) {
  return Floats(vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_bytes(from)))))));
}
inline Floats widen_bytes(const Float8E5M2* from) {
  return widen_bits(vreinterpretq_s16_u16(vshll_n_u8(load_bytes(from), 8)));
}
inline int16x8_t e4m3_as_half(const Float8E4M3* from) {
  const int16x8_t halves = vshlq_n_s16(vmovl_s8(vreinterpret_s8_u8(load_bytes(from))), 7);
  return vandq_s16(halves, vdupq_n_s16(kE4M3Bits));  // sign extension set one bit more
}
inline Floats widen_bytes(const Float8E4M3* from) {
  const int16x8_t placed = e4m3_as_half(from);
  const int16x8_t carry = vandq_s16(vaddq_s16(placed, vdupq_n_s16(kE4M3Last)), vdupq_n_s16(kE4M3Carry));
  return widen_bits(vorrq_s16(placed, carry)) * kE4M3Power;
}
// Widens as above, but divides by kE4M3Power and never yields NaN.
inline Floats widen_small(const Float8E4M3* from) { return widen_bits(e4m3_as_half(from)); }

inline void narrow_halves(Float16* to, Floats x) { vst1_u16(&to->bits, vreinterpret_u16_f16(vcvt_f16_f32(x))); }

}  // namespace
}  // namespace scaledot
