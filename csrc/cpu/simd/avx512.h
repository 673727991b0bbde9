// 64-byte vectors: AVX-512 F, BW, DQ, VL.
#pragma once

#include <immintrin.h>

#include "core/number.h"

namespace scaledot {
namespace {

constexpr int kVectorBytes = 64;
constexpr int kStripRows = 14;  // 14 x 2 sums, 2 vectors of B and one of A in 32 registers

// Some intrinsics are in their form with a (full) mask, because GCC 12 warns about its own header in the other.
constexpr __mmask8 kAll8 = 0xff;
constexpr __mmask16 kAll16 = 0xffff;

inline __m512 multiply_add(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
inline __m512d multiply_add(__m512d a, __m512d b, __m512d c) { return _mm512_fmadd_pd(a, b, c); }
inline __m512 maximum(__m512 a, __m512 b) { return _mm512_maskz_max_ps(kAll16, a, b); }
inline __m512d maximum(__m512d a, __m512d b) { return _mm512_maskz_max_pd(kAll8, a, b); }

inline __m512 widen_halves(const Float16* from) {
  return _mm512_maskz_cvtph_ps(kAll16, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline void narrow_halves(Float16* to, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtps_ph(kAll16, x, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace
}  // namespace scaledot
