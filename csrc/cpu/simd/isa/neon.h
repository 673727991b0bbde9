// 16-byte vectors of ARM64: NEON (Advanced SIMD), which every ARM64 CPU has.
#pragma once

#include <arm_neon.h>

#include "core/number.h"

namespace scaledot {
namespace {

constexpr int kVectorBytes = 16;
constexpr int kVectorRegisters = 32;

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

// One vector of unsigned integers, widened to 32 bits (words) or 64 bits (longs).
inline uint32x4_t halves_as_words(const uint16_t* from) { return vmovl_u16(vld1_u16(from)); }
inline uint32x4_t bytes_as_words(const uint8_t* from) {
  uint32_t bytes;
  __builtin_memcpy(&bytes, from, sizeof(bytes));
  return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes))));
}
inline uint64x2_t bytes_as_longs(const uint8_t* from) { return uint64x2_t{from[0], from[1]}; }
inline uint64x2_t words_as_longs(const uint32_t* from) { return vmovl_u32(vld1_u32(from)); }

inline void stream(float* to, Floats x) { vst1q_f32(to, x); }
inline void end_streams() {}

inline Floats widen_halves(const Float16* from) {
  return Floats(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits))));
}
inline void narrow_halves(Float16* to, Floats x) { vst1_u16(&to->bits, vreinterpret_u16_f16(vcvt_f16_f32(x))); }

}  // namespace
}  // namespace scaledot
