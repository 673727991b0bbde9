// Replaces the compiler's <immintrin.h>, so that the AVX-512 kernels can be compiled for a CPU with AVX2 and tested
// there. It has the AVX-512 intrinsics that they call, as plain C++ on vectors of 64 bytes. The compiler splits these
// into two of 32.
//
// Each follows Intel's Intrinsics Guide, lane by lane. Masks have to be full where the kernels' are. An intrinsic that
// is not here does not compile. This does not test gcc's code for AVX-512, nor its speed.
#pragma once

#include_next <immintrin.h>

#include <cstdint>

#include "tile_unit.h"

namespace scaledot {
namespace avx512_sim {

using Words = uint32_t __attribute__((vector_size(64), may_alias));
using Longs = uint64_t __attribute__((vector_size(64), may_alias));
constexpr int kWords = 16, kLongs = 8;

template <class Result, class Function>
inline Result lanes(int count, const Function& of_lane) {
  Result result;
  for (int k = 0; k < count; ++k) result[k] = of_lane(k);
  return result;
}

// Only full masks are supported, except by load_bytes: any other is an error in the test.
inline void expect_full(__mmask16 mask, int count) {
  if (mask != (1u << count) - 1) __builtin_trap();
}

template <class To, class From>
inline To copied(const From* from) {
  To to;
  __builtin_memcpy(&to, from, sizeof to);
  return to;
}

inline __m512i load_bytes(__mmask64 mask, const void* from) {
  uint8_t bytes[sizeof(__m512i)] = {};
  for (size_t k = 0; k < sizeof bytes; ++k)
    if (mask >> k & 1) bytes[k] = static_cast<const uint8_t*>(from)[k];
  return copied<__m512i>(bytes);
}

// ---------------------------------------------------------------------------------------------------- arithmetic
inline __m512 fmadd(__m512 a, __m512 b, __m512 c) {
  return lanes<__m512>(kWords, [&](int k) { return __builtin_fmaf(a[k], b[k], c[k]); });
}
inline __m512d fmadd(__m512d a, __m512d b, __m512d c) {
  return lanes<__m512d>(kLongs, [&](int k) { return __builtin_fma(a[k], b[k], c[k]); });
}

// The second operand if either is NaN or both are 0.
inline __m512 max(__mmask16 mask, __m512 a, __m512 b) {
  expect_full(mask, kWords);
  return a > b ? a : b;
}
inline __m512d max(__mmask16 mask, __m512d a, __m512d b) {
  expect_full(mask, kLongs);
  return a > b ? a : b;
}

// 0 where the mask is 0, otherwise y * 2^floor(n), rounded once, also to a subnormal.
template <class T>
inline T scaled(T y, T n) {
  if (y != y || n != n) return y + n;
  const T least = -5000, most = 5000;
  return __builtin_ldexp(y, int(__builtin_floor(n < least ? least : n > most ? most : n)));
}
inline __m512 scalef(__mmask16 mask, __m512 y, __m512 n) {
  return lanes<__m512>(kWords, [&](int k) { return mask >> k & 1 ? scaled(y[k], n[k]) : 0; });
}
inline __m512d scalef(__mmask8 mask, __m512d y, __m512d n) {
  return lanes<__m512d>(kLongs, [&](int k) { return mask >> k & 1 ? scaled(y[k], n[k]) : 0; });
}

// x - round(x), to even; 0 for infinities.
inline __m512 off_integer(__mmask16 mask, __m512 x, int how) {
  expect_full(mask, kWords);
  if (how != _MM_FROUND_TO_NEAREST_INT) __builtin_trap();
  return lanes<__m512>(kWords, [&](int k) { return __builtin_isinf(x[k]) ? 0 : x[k] - __builtin_nearbyintf(x[k]); });
}
inline __m512d off_integer(__mmask8 mask, __m512d x, int how) {
  expect_full(mask, kLongs);
  if (how != _MM_FROUND_TO_NEAREST_INT) __builtin_trap();
  return lanes<__m512d>(kLongs, [&](int k) { return __builtin_isinf(x[k]) ? 0 : x[k] - __builtin_nearbyint(x[k]); });
}

template <class Vector>
inline unsigned compare(int count, Vector a, Vector b, int how) {
  unsigned mask = 0;
  for (int k = 0; k < count; ++k) {
    if (how != _CMP_GT_OQ) __builtin_trap();
    mask |= unsigned(a[k] > b[k]) << k;
  }
  return mask;
}
inline __mmask16 compare(__m512 a, __m512 b, int how) { return __mmask16(compare(kWords, a, b, how)); }
inline __mmask8 compare(__m512d a, __m512d b, int how) { return __mmask8(compare(kLongs, a, b, how)); }

// ---------------------------------------------------------------------------------------------------- integers
inline __m512i multiply_low_words(__mmask16 mask, __m512i a, __m512i b) {
  expect_full(mask, kLongs);
  return __m512i((Longs(a) & 0xffffffff) * (Longs(b) & 0xffffffff));
}
// Bit i of the result is bit 4 a + 2 b + c of the table.
inline __m512i ternary(__m512i a, __m512i b, __m512i c, int table) {
  __m512i result = {};
  for (int row = 0; row < 8; ++row)
    if (table >> row & 1) result |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
  return result;
}
inline __m512i shift_words_left(__mmask16 mask, __m512i x, unsigned by) {
  expect_full(mask, kWords);
  return __m512i(Words(x) << by);
}

inline __m512 as_floats(__mmask16 mask, __m512i x) {
  expect_full(mask, kWords);
  return lanes<__m512>(kWords, [&](int k) { return float(int32_t(Words(x)[k])); });
}

template <class Small, class Large, class Packed>
inline __m512i widened(__mmask16 mask, int count, Packed packed) {
  expect_full(mask, count);
  Small numbers[sizeof(Packed) / sizeof(Small)];
  __builtin_memcpy(numbers, &packed, sizeof numbers);
  return __m512i(lanes<Large>(count, [&](int k) { return numbers[k]; }));
}

// ---------------------------------------------------------------------------------------------------- 16-bit formats
inline __m512 widen_halves(__mmask16 mask, __m256i x) {
  expect_full(mask, kWords);
  const __m256 half[] = {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
  return copied<__m512>(half);
}
template <int kHow>
inline __m256i narrow_halves(__mmask16 mask, __m512 x) {
  expect_full(mask, kWords);
  __m256 half[2];
  __builtin_memcpy(half, &x, sizeof x);
  return _mm256_set_m128i(_mm256_cvtps_ph(half[1], kHow), _mm256_cvtps_ph(half[0], kHow));
}

// AVX512_BF16 treats subnormals as 0, in inputs and results.
inline float without_subnormal(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0, x) : x; }
inline float widen_bfloat16(uint32_t bits) { return without_subnormal(__builtin_bit_cast(float, bits << 16)); }
inline __m512 dot_bfloat16(__m512 sum, __m512bh a, __m512bh b) {
  const Words x = __builtin_bit_cast(Words, a), y = __builtin_bit_cast(Words, b);
  return lanes<__m512>(kWords, [&](int k) {
    const float odd = __builtin_fmaf(widen_bfloat16(x[k] >> 16), widen_bfloat16(y[k] >> 16), without_subnormal(sum[k]));
    return without_subnormal(
        __builtin_fmaf(widen_bfloat16(x[k] & 0xffff), widen_bfloat16(y[k] & 0xffff), without_subnormal(odd)));
  });
}
inline __m256bh narrow_bfloat16(__mmask16 mask, __m512 x) {
  expect_full(mask, kWords);
  uint16_t result[kWords];
  for (int k = 0; k < kWords; ++k) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, without_subnormal(x[k]));
    const bool nan = x[k] != x[k];
    result[k] = uint16_t(nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  return copied<__m256bh>(result);
}

}  // namespace avx512_sim
}  // namespace scaledot

#define _mm512_set1_ps(x) (__m512{} + (x))
#define _mm512_set1_pd(x) (__m512d{} + (x))
#define _mm512_set1_epi32(x) __m512i(scaledot::avx512_sim::Words{} + uint32_t(x))
#define _mm512_loadu_si512(from) scaledot::avx512_sim::copied<__m512i>(static_cast<const void*>(from))
#define _mm512_maskz_loadu_epi8 scaledot::avx512_sim::load_bytes
#define _mm512_storeu_si512(to, x) __builtin_memcpy(to, &(x), sizeof(x))
#define _mm512_stream_ps(to, x) (*reinterpret_cast<__m512*>(to) = (x))
#define _mm512_or_si512(a, b) ((a) | (b))

#define _mm512_fmadd_ps scaledot::avx512_sim::fmadd
#define _mm512_fmadd_pd scaledot::avx512_sim::fmadd
#define _mm512_maskz_max_ps scaledot::avx512_sim::max
#define _mm512_maskz_max_pd scaledot::avx512_sim::max
#undef _mm512_maskz_reduce_ps
#define _mm512_maskz_reduce_ps scaledot::avx512_sim::off_integer
#undef _mm512_maskz_reduce_pd
#define _mm512_maskz_reduce_pd scaledot::avx512_sim::off_integer
#define _mm512_maskz_scalef_ps scaledot::avx512_sim::scalef
#define _mm512_maskz_scalef_pd scaledot::avx512_sim::scalef
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask scaledot::avx512_sim::compare
#undef _mm512_cmp_pd_mask
#define _mm512_cmp_pd_mask scaledot::avx512_sim::compare
#define _mm512_maskz_mul_epu32 scaledot::avx512_sim::multiply_low_words
#undef _mm512_ternarylogic_epi64
#define _mm512_ternarylogic_epi64 scaledot::avx512_sim::ternary
#undef _mm512_maskz_slli_epi32
#define _mm512_maskz_slli_epi32 scaledot::avx512_sim::shift_words_left

#define _mm512_maskz_cvtepi8_epi32(mask, x) \
  scaledot::avx512_sim::widened<int8_t, scaledot::avx512_sim::Words>(mask, scaledot::avx512_sim::kWords, x)
#define _mm512_maskz_cvtepi32_ps scaledot::avx512_sim::as_floats
#define _mm512_mul_ps(a, b) ((a) * (b))
#define _mm512_maskz_cvtepu8_epi32(mask, x) \
  scaledot::avx512_sim::widened<uint8_t, scaledot::avx512_sim::Words>(mask, 16, x)
#define _mm512_maskz_cvtepu8_epi64(mask, x) \
  scaledot::avx512_sim::widened<uint8_t, scaledot::avx512_sim::Longs>(mask, 8, x)
#define _mm512_maskz_cvtepu16_epi32(mask, x) \
  scaledot::avx512_sim::widened<uint16_t, scaledot::avx512_sim::Words>(mask, 16, x)
#define _mm512_maskz_cvtepu32_epi64(mask, x) \
  scaledot::avx512_sim::widened<uint32_t, scaledot::avx512_sim::Longs>(mask, 8, x)

#define _mm512_maskz_cvtph_ps scaledot::avx512_sim::widen_halves
#undef _mm512_maskz_cvtps_ph
#define _mm512_maskz_cvtps_ph(mask, x, how) scaledot::avx512_sim::narrow_halves<how>(mask, x)
#define _mm512_dpbf16_ps scaledot::avx512_sim::dot_bfloat16
#define _mm512_maskz_cvtneps_pbh scaledot::avx512_sim::narrow_bfloat16

// ---------------------------------------------------------------------------------------------------- tiles
#undef _tile_loadconfig
#undef _tile_storeconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig scaledot::tile_sim::load_configuration
#define _tile_storeconfig scaledot::tile_sim::store_configuration
#define _tile_release scaledot::tile_sim::release
#define _tile_zero scaledot::tile_sim::zero
#define _tile_loadd scaledot::tile_sim::load
#define _tile_stream_loadd scaledot::tile_sim::load
#define _tile_stored scaledot::tile_sim::store
#define _tile_dpbf16ps scaledot::tile_sim::dot_bfloat16
