#include <immintrin.h>

#include "loops.h"

namespace scaledot::bench {
namespace {

// One vdpbf16ps adds two products to each of 16 sums.
constexpr double kFlops = 2.0 * 2 * 16 * kChains;

double dot_products(int64_t rounds) {
  const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80), zero = (__m512bh)_mm512_setzero_si512();
  __m512 x[kChains];
  for (int k = 0; k < kChains; ++k) x[k] = _mm512_set1_ps(float(k));
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int k = 0; k < kChains; ++k) x[k] = _mm512_dpbf16_ps(x[k], one, zero);
  }
  return sum_of<kChains>(x);
}

}  // namespace

extern const ArithmeticLoop kAvx512Bfloat16 = {"bf16 vdpbf16ps", kFlops, dot_products};

}  // namespace scaledot::bench
