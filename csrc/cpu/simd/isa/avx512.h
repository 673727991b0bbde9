// 64-byte vectors: AVX-512 F, BW, DQ, VL.
#pragma once

#include <immintrin.h>

#include "core/number.h"

namespace scaledot {
namespace {

constexpr int kVectorBytes = 64;
constexpr int kVectorRegisters = 32;
constexpr bool kFmaRoundsOnce = true;

// Some intrinsics are called in their masked form with a full mask: GCC 12 warns about its own header otherwise.
constexpr __mmask8 kAll8 = 0xff;
constexpr __mmask16 kAll16 = 0xffff;

inline __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
inline __m512d fma(__m512d a, __m512d b, __m512d c) { return _mm512_fmadd_pd(a, b, c); }
inline __m512 maximum(__m512 a, __m512 b) { return _mm512_maskz_max_ps(kAll16, a, b); }
inline __m512d maximum(__m512d a, __m512d b) { return _mm512_maskz_max_pd(kAll8, a, b); }

// y 2^n for any integer n, and for infinities; x - round(x), which is 0 for infinities.
constexpr bool kHasLdexp = true;
inline __m512 ldexp(__m512 y, __m512 n) { return _mm512_maskz_scalef_ps(kAll16, y, n); }
inline __m512d ldexp(__m512d y, __m512d n) { return _mm512_maskz_scalef_pd(kAll8, y, n); }
inline __m512 off_integer(__m512 x) { return _mm512_maskz_reduce_ps(kAll16, x, _MM_FROUND_TO_NEAREST_INT); }
inline __m512d off_integer(__m512d x) { return _mm512_maskz_reduce_pd(kAll8, x, _MM_FROUND_TO_NEAREST_INT); }
inline bool any_above(__m512 x, float limit) { return _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0; }
inline bool any_above(__m512d x, double limit) { return _mm512_cmp_pd_mask(x, _mm512_set1_pd(limit), _CMP_GT_OQ) != 0; }

// 64-bit products of the low 32 bits of each 64-bit lane.
using WideWords = uint64_t __attribute__((vector_size(kVectorBytes)));
inline WideWords multiply_words(WideWords a, WideWords b) {
  return WideWords(_mm512_maskz_mul_epu32(kAll8, __m512i(a), __m512i(b)));
}
inline WideWords exclusive_or(WideWords a, WideWords b, WideWords c) {
  return WideWords(_mm512_ternarylogic_epi64(__m512i(a), __m512i(b), __m512i(c), 0x96));
}

// One vector of unsigned integers, widened to 32 bits (words) or 64 bits (longs).
inline __m512i bytes_as_words(const uint8_t* from) {
  return _mm512_maskz_cvtepu8_epi32(kAll16, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline __m512i bytes_as_longs(const uint8_t* from) { return _mm512_maskz_cvtepu8_epi64(kAll8, _mm_loadu_si64(from)); }
inline __m512i halves_as_words(const uint16_t* from) {
  return _mm512_maskz_cvtepu16_epi32(kAll16, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline __m512i words_as_longs(const uint32_t* from) {
  return _mm512_maskz_cvtepu32_epi64(kAll8, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// The first `bytes` bytes, from 1 to 64, and zeros. No other byte is read.
using Bytes = uint8_t __attribute__((vector_size(kVectorBytes)));
inline Bytes first_bytes(const void* from, int64_t bytes, Bytes) {
  return Bytes(_mm512_maskz_loadu_epi8(~uint64_t(0) >> (kVectorBytes - bytes), from));
}

inline void stream(float* to, __m512 x) { _mm512_stream_ps(to, x); }
inline void end_streams() { _mm_sfence(); }

inline __m512 widen_halves(const Float16* from) {
  return _mm512_maskz_cvtph_ps(kAll16, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// One vector of numbers of 8 bits. Those of floating point are first moved to where float16 has them.
inline __m128i load_bytes(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
inline __m512 widen_bytes(const Int8* from) {
  return _mm512_maskz_cvtepi32_ps(kAll16, _mm512_maskz_cvtepi8_epi32(kAll16, load_bytes(from)));
}
inline __m512 widen_bytes(const Float8E5M2* from) {
  return _mm512_maskz_cvtph_ps(kAll16, _mm256_slli_epi16(_mm256_cvtepu8_epi16(load_bytes(from)), 8));
}
inline __m512 widen_bytes(const Float8E4M3* from) {
  const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_bytes(from)), 7);
  const __m256i placed = _mm256_and_si256(halves, _mm256_set1_epi16(kE4M3Bits));  // sign extension set one bit more
  const __m256i carry =
      _mm256_and_si256(_mm256_add_epi16(placed, _mm256_set1_epi16(kE4M3Last)), _mm256_set1_epi16(kE4M3Carry));
  return _mm512_mul_ps(_mm512_maskz_cvtph_ps(kAll16, _mm256_or_si256(placed, carry)), _mm512_set1_ps(kE4M3Power));
}
// Widens as above, but divides by kE4M3Power and never yields NaN.
inline __m512 widen_small(const Float8E4M3* from) {
  const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_bytes(from)), 7);
  return _mm512_maskz_cvtph_ps(kAll16, _mm256_and_si256(halves, _mm256_set1_epi16(kE4M3Bits)));
}

inline void narrow_halves(Float16* to, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtps_ph(kAll16, x, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace
}  // namespace scaledot
