// From the bytes of quantised keys and values to 16-bit or float32 numbers.
//
// float16 has all numbers of the three formats (4 bits of mantissa and 448 down to 2^-9; the upper half of a float16;
// -128 to 127). So a pair of bytes becomes a pair of float16 first, and then two float32, or a pair of bfloat16, which
// has them all too.
#pragma once

#include "cuda/ptx/convert.h"
#include "cuda/ptx/memory.h"

namespace scaledot {
namespace {

// For select_bytes(four, 0, ...): two of the bytes, each in the upper half of 16 bits.
constexpr uint32_t kFirstTwo = 0x1404, kLastTwo = 0x3424;

SCALEDOT_FN uint32_t twice(uint16_t bits) { return uint32_t(bits) << 16 | bits; }

// The bytes of `two`, each in the upper half of 16 bits, as float16. Moved down by a bit, a number of e4m3 has the bits
// of a float16 that is kPower too small. Its NaN would be 480, next to 448, the largest number: multiplied by
// kOverflows only the former is infinite, and infinity times 0 is NaN.
SCALEDOT_DEVICE uint32_t float16_pair(uint32_t two, Type<Float8E4M3>) {
  constexpr uint32_t kPower = twice(0x5c00);      // 256
  constexpr uint32_t kOverflows = twice(0x7884);  // 36992: times 1.75 it is 64736, times 1.875 too large
  constexpr uint32_t kMinusZero = twice(0x8000);
  const uint32_t small = (two & 0x80008000u) | (two & 0x7f007f00u) >> 1;
  const uint32_t number = fma_pair(small, kPower, kMinusZero);
  return fma_pair(fma_pair(small, kOverflows, kMinusZero), 0, number);
}
SCALEDOT_DEVICE uint32_t float16_pair(uint32_t two, Type<Float8E5M2>) { return two; }
// x + 128 are the last 8 bits of the float16 1024 + (x + 128).
SCALEDOT_DEVICE uint32_t float16_pair(uint32_t two, Type<Int8>) {
  constexpr uint32_t k1024 = twice(0x6400), kOne = twice(0x3c00), kMinus1152 = twice(0xe480);
  return fma_pair(((two ^ 0x80008000u) >> 8) | k1024, kOne, kMinus1152);
}

// Eight widened numbers in a row of a panel.
SCALEDOT_DEVICE void store_eight(const uint32_t (&pairs)[4], Float16* to) {
  shared_store(reinterpret_cast<AlignedVector<uint32_t, 4>*>(to),
               AlignedVector<uint32_t, 4>{pairs[0], pairs[1], pairs[2], pairs[3]});
}
SCALEDOT_DEVICE void store_eight(const uint32_t (&pairs)[4], BFloat16* to) {
  AlignedVector<uint32_t, 4> narrowed;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float low, high;
    widen_pair(pairs[k], low, high);
    narrowed.x[k] = narrow_pair(low, high, Type<BFloat16>{});
  }
  shared_store(reinterpret_cast<AlignedVector<uint32_t, 4>*>(to), narrowed);
}
SCALEDOT_DEVICE void store_eight(const uint32_t (&pairs)[4], float* to) {
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
    AlignedVector<float, 4> four;
    widen_pair(pairs[k], four.x[0], four.x[1]);
    widen_pair(pairs[k + 1], four.x[2], four.x[3]);
    shared_store(reinterpret_cast<AlignedVector<float, 4>*>(to) + k / 2, four);
  }
}

// Four bytes as two pairs of float16.
template <class Stored>
SCALEDOT_DEVICE void float16_pairs(uint32_t four, uint32_t& first, uint32_t& last, Type<Stored> type) {
  first = float16_pair(select_bytes(four, 0, kFirstTwo), type);
  last = float16_pair(select_bytes(four, 0, kLastTwo), type);
}
SCALEDOT_DEVICE void float16_pairs(uint32_t four, uint32_t& first, uint32_t& last, Type<Float8E4M3> type) {
  if constexpr (kWidensE4M3)
    first = widen_e4m3(uint16_t(four)), last = widen_e4m3(uint16_t(four >> 16));
  else
    float16_pairs<Float8E4M3>(four, first, last, type);
}

// Eight stored numbers, widened to a row of a panel.
template <class Storage, class Stored>
SCALEDOT_DEVICE void widen_eight(uint32_t first, uint32_t last, Storage* to, Type<Stored> type) {
  uint32_t pairs[4];
  float16_pairs(first, pairs[0], pairs[1], type);
  float16_pairs(last, pairs[2], pairs[3], type);
  store_eight(pairs, to);
}

}  // namespace
}  // namespace scaledot
