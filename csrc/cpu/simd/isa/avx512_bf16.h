// AVX-512 with AVX512_BF16: what Bf16Pairs (simd/bf16_pairs.h) need.
#pragma once

#include "cpu/simd/isa/avx512.h"

namespace scaledot {
namespace {

using Bf16PairWords = uint32_t __attribute__((vector_size(kVectorBytes)));
using Halves = uint16_t __attribute__((vector_size(kVectorBytes / 2)));

// c + a.first * b.first + a.second * b.second in each lane.
inline __m512 multiply_bf16_pairs(Bf16PairWords a, Bf16PairWords b, __m512 c) {
  return _mm512_dpbf16_ps(c, __builtin_bit_cast(__m512bh, a), __builtin_bit_cast(__m512bh, b));
}
inline Halves narrow_to_bfloat16(__m512 x) { return __builtin_bit_cast(Halves, _mm512_maskz_cvtneps_pbh(kAll16, x)); }
inline __m512i halves_as_words(Halves x) { return _mm512_maskz_cvtepu16_epi32(kAll16, __builtin_bit_cast(__m256i, x)); }

}  // namespace
}  // namespace scaledot
