// 32-byte vectors: AVX2, FMA, F16C.
#pragma once

#include <immintrin.h>

#include "core/number.h"

namespace scaledot {
namespace {

constexpr int kVectorBytes = 32;
constexpr int kVectorRegisters = 16;
constexpr bool kFmaRoundsOnce = true;
constexpr bool kHasLdexp = false;  // no instruction for y 2^n

inline __m256 fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
inline __m256d fma(__m256d a, __m256d b, __m256d c) { return _mm256_fmadd_pd(a, b, c); }
inline __m256 maximum(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
inline __m256d maximum(__m256d a, __m256d b) { return _mm256_max_pd(a, b); }

inline __m256 round_to_integer(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT); }
inline __m256d round_to_integer(__m256d x) { return _mm256_round_pd(x, _MM_FROUND_TO_NEAREST_INT); }
inline bool any_above(__m256 x, float limit) {
  return _mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_GT_OQ)) != 0;
}
inline bool any_above(__m256d x, double limit) {
  return _mm256_movemask_pd(_mm256_cmp_pd(x, _mm256_set1_pd(limit), _CMP_GT_OQ)) != 0;
}

// 64-bit products of the low 32 bits of each 64-bit lane.
using WideWords = uint64_t __attribute__((vector_size(kVectorBytes)));
inline WideWords multiply_words(WideWords a, WideWords b) {
  return WideWords(_mm256_mul_epu32(__m256i(a), __m256i(b)));
}
inline WideWords exclusive_or(WideWords a, WideWords b, WideWords c) { return a ^ b ^ c; }

// One vector of unsigned integers, widened to 32 bits (words) or 64 bits (longs).
inline __m256i bytes_as_words(const uint8_t* from) { return _mm256_cvtepu8_epi32(_mm_loadu_si64(from)); }
inline __m256i bytes_as_longs(const uint8_t* from) { return _mm256_cvtepu8_epi64(_mm_loadu_si32(from)); }
inline __m256i halves_as_words(const uint16_t* from) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline __m256i words_as_longs(const uint32_t* from) {
  return _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// The first `bytes` bytes, from 1 to 32, and zeros. No other byte is read.
using Bytes = uint8_t __attribute__((vector_size(kVectorBytes)));
inline Bytes first_bytes(const void* from, int64_t bytes, Bytes) {
  const __m256i word = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), words = _mm256_set1_epi32(int(bytes / 4));
  const __m256i whole = _mm256_maskload_epi32(static_cast<const int*>(from), _mm256_cmpgt_epi32(words, word));
  uint32_t last = 0;  // what is left of a word
  for (int64_t k = bytes / 4 * 4; k < bytes; ++k) last |= uint32_t(static_cast<const uint8_t*>(from)[k]) << k % 4 * 8;
  return Bytes(_mm256_or_si256(whole, _mm256_and_si256(_mm256_cmpeq_epi32(words, word), _mm256_set1_epi32(int(last)))));
}

inline void stream(float* to, __m256 x) { _mm256_stream_ps(to, x); }
inline void end_streams() { _mm_sfence(); }

inline __m256 widen_halves(const Float16* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// One vector of numbers of 8 bits. Those of floating point are first moved to where float16 has them.
inline __m256 widen_bytes(const Int8* from) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(from))); }
inline __m256 widen_bytes(const Float8E5M2* from) {
  return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadu_si64(from)));
}
inline __m256 widen_bytes(const Float8E4M3* from) {
  const __m128i halves = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadu_si64(from)), 7);
  const __m128i placed = _mm_and_si128(halves, _mm_set1_epi16(kE4M3Bits));  // sign extension set one bit more
  const __m128i carry = _mm_and_si128(_mm_add_epi16(placed, _mm_set1_epi16(kE4M3Last)), _mm_set1_epi16(kE4M3Carry));
  return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(placed, carry)), _mm256_set1_ps(kE4M3Power));
}
// Widens as above, but divides by kE4M3Power and never yields NaN.
inline __m256 widen_small(const Float8E4M3* from) {
  const __m128i halves = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadu_si64(from)), 7);
  return _mm256_cvtph_ps(_mm_and_si128(halves, _mm_set1_epi16(kE4M3Bits)));
}

inline void narrow_halves(Float16* to, __m256 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace
}  // namespace scaledot
