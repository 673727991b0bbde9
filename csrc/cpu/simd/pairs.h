// Pair: two bfloat16 that are neighbours along the depth of a product. It is the operand of AVX512_BF16's vdpbf16ps:
//   sum + a.first * b.first + a.second * b.second, in float32.
// With Vec<Pair> and OperandTraits<Pair>, gemm.h multiplies Pairs as it multiplies floats.
#pragma once

#include "cpu/simd/gemm.h"

namespace scaledot {
namespace {

struct Pair {
  BFloat16 first, second;
};

template <>
struct Vec<Pair> {
  __m512i v;
  SCALEDOT_INLINE Vec() = default;
  SCALEDOT_INLINE Vec(__m512i native) : v(native) {}
  SCALEDOT_INLINE explicit Vec(Pair x) : v(_mm512_set1_epi32(__builtin_bit_cast(int32_t, x))) {}
};

SCALEDOT_INLINE Vec<Pair> load(const Pair* from) { return _mm512_loadu_si512(from); }
SCALEDOT_INLINE void store(Pair* to, Vec<Pair> x) { _mm512_storeu_si512(to, x.v); }
SCALEDOT_INLINE Vec<float> fma(Vec<Pair> a, Vec<Pair> b, Vec<float> c) {
  return _mm512_dpbf16_ps(c.v, __builtin_bit_cast(__m512bh, a.v), __builtin_bit_cast(__m512bh, b.v));
}

template <>
struct OperandTraits<Pair> {
  using Sum = float;
  using Element = BFloat16;
  static constexpr int kElements = 2;

  static float element(Pair x, int part) { return widen(part ? x.second : x.first); }
  SCALEDOT_INLINE static Vec<Pair> along_row(const BFloat16* row, int64_t depth) {
    return _mm512_loadu_si512(row + kElements * depth);
  }
  SCALEDOT_INLINE static Vec<Pair> across_rows(const BFloat16* rows, int64_t width) {
    return join(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows)),
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows + width)));
  }
  SCALEDOT_INLINE static void store_along(Pair* row, int64_t k, Vec<float> x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<BFloat16*>(row) + k), narrowed(x));
  }
  SCALEDOT_INLINE static void store_across(Pair* columns, const Vec<float>* x) {
    store(columns, join(narrowed(x[0]), narrowed(x[1])));
  }

 private:
  SCALEDOT_INLINE static __m256i narrowed(Vec<float> x) {
    return __builtin_bit_cast(__m256i, _mm512_maskz_cvtneps_pbh(kAll16, x.v));
  }
  // first[0], second[0], first[1], second[1], ...
  SCALEDOT_INLINE static Vec<Pair> join(__m256i first, __m256i second) {
    const __m512i low = _mm512_maskz_cvtepu16_epi32(kAll16, first), high = _mm512_maskz_cvtepu16_epi32(kAll16, second);
    return Vec<Pair>(_mm512_or_si512(low, _mm512_maskz_slli_epi32(kAll16, high, 16)));
  }
};

}  // namespace
}  // namespace scaledot
