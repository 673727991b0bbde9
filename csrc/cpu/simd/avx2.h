// 32-byte vectors: AVX2, FMA, F16C.
#pragma once

#include <immintrin.h>

#include "core/number.h"

namespace scaledot {
namespace {

constexpr int kVectorBytes = 32;
constexpr int kStripRows = 6;  // 6 x 2 sums, 2 vectors of B and one of A in 16 registers

inline __m256 multiply_add(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
inline __m256d multiply_add(__m256d a, __m256d b, __m256d c) { return _mm256_fmadd_pd(a, b, c); }
inline __m256 maximum(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
inline __m256d maximum(__m256d a, __m256d b) { return _mm256_max_pd(a, b); }

inline __m256 widen_halves(const Float16* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void narrow_halves(Float16* to, __m256 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace
}  // namespace scaledot
