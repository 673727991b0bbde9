// NEON with FEAT_BF16: what Bf16Pairs (simd/bf16_pairs.h) need.
#pragma once

#include "cpu/simd/isa/neon.h"

namespace scaledot {
namespace {

using Bf16PairWords = uint32_t __attribute__((vector_size(kVectorBytes)));
using Halves = uint16_t __attribute__((vector_size(kVectorBytes / 2)));

// c + a.first * b.first + a.second * b.second in each lane.
inline Floats multiply_bf16_pairs(Bf16PairWords a, Bf16PairWords b, Floats c) {
  return Floats(vbfdotq_f32(c, __builtin_bit_cast(bfloat16x8_t, a), __builtin_bit_cast(bfloat16x8_t, b)));
}
inline Halves narrow_to_bfloat16(Floats x) { return __builtin_bit_cast(Halves, vcvt_bf16_f32(x)); }
inline uint32x4_t halves_as_words(Halves x) { return vmovl_u16(uint16x4_t(x)); }

}  // namespace
}  // namespace scaledot
