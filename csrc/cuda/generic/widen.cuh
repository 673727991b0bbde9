// From the bytes of quantised keys and values to 16-bit or float32 numbers.
//
// float16 and bfloat16 both have all numbers of the three formats (4 bits of mantissa and 448 down to 2^-9; the upper
// half of a float16; -128 to 127). A pair of bytes becomes a pair of float16 first, and that becomes two float32 or a
// pair of bfloat16. Only int8 has a shorter way to bfloat16.
#pragma once

#include "cuda/ptx/convert.h"
#include "cuda/ptx/memory.h"

namespace scaledot {
namespace {

// For select_bytes(four, other, ...): two bytes of `four`, each in the upper half of 16 bits, or in the lower half. The
// other half is a byte of `other`, which has four equal ones.
constexpr uint32_t kFirstTwo = 0x1404, kLastTwo = 0x3424;
constexpr uint32_t kLowerFirstTwo = 0x4140, kLowerLastTwo = 0x4342;

SCALEDOT_FN uint32_t twice(uint16_t bits) { return uint32_t(bits) << 16 | bits; }

// The bytes of `two`, each in the upper half of 16 bits, as float16. Moved down by a bit, a number of e4m3 has the bits
// of a float16 that is kPower too small. Its NaN would be 480, next to 448, the largest number: multiplied by
// kOverflows only the former is infinite, and infinity times 0 is NaN.
SCALEDOT_DEVICE uint32_t float16_pair(uint32_t two, Type<Float8E4M3>) {
  constexpr uint32_t kPower = twice(0x5c00);      // 256
  constexpr uint32_t kOverflows = twice(0x7884);  // 36992: times 1.75 it is 64736, times 1.875 too large
  constexpr uint32_t kMinusZero = twice(0x8000);
  const uint32_t small = (two & 0x80008000u) | (two & 0x7f007f00u) >> 1;
  constexpr Type<Float16> type = {};
  const uint32_t number = fma_pair(small, kPower, kMinusZero, type);
  return fma_pair(fma_pair(small, kOverflows, kMinusZero, type), 0, number, type);
}
SCALEDOT_DEVICE uint32_t float16_pair(uint32_t two, Type<Float8E5M2>) { return two; }
// Four stored numbers as two pairs of float16.
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
// x + 128 are the last 8 bits of the float16 1024 + (x + 128).
SCALEDOT_DEVICE void float16_pairs(uint32_t four, uint32_t& first, uint32_t& last, Type<Int8>) {
  constexpr uint32_t kUpper = 0x64646464u;  // the upper half of the float16 1024
  constexpr uint32_t kOne = twice(0x3c00), kMinus1152 = twice(0xe480);
  const uint32_t moved = four ^ 0x80808080u;
  first = fma_pair(select_bytes(moved, kUpper, kLowerFirstTwo), kOne, kMinus1152, Type<Float16>{});
  last = fma_pair(select_bytes(moved, kUpper, kLowerLastTwo), kOne, kMinus1152, Type<Float16>{});
}

// Four stored numbers as two pairs of a 16-bit type.
template <class Stored>
SCALEDOT_DEVICE void widen_four(uint32_t four, uint32_t& first, uint32_t& last, Type<Stored> type, Type<Float16>) {
  float16_pairs(four, first, last, type);
}
template <class Stored>
SCALEDOT_DEVICE void widen_four(uint32_t four, uint32_t& first, uint32_t& last, Type<Stored> type, Type<BFloat16>) {
  float16_pairs(four, first, last, type);
  for (uint32_t* pair : {&first, &last}) {
    float low, high;
    widen_pair(*pair, low, high);
    *pair = narrow_pair(low, high, Type<BFloat16>{});
  }
}
// The last 8 bits of the bfloat16 128 take an int8. Without its sign bit this is 128 + (x & 127). With the sign bit
// alone it is 128, or 256 if x is negative. x is the difference of the two.
SCALEDOT_DEVICE void widen_four(uint32_t four, uint32_t& first, uint32_t& last, Type<Int8>, Type<BFloat16>) {
  constexpr uint32_t kUpper = 0x43434343u;  // the upper half of the bfloat16 128
  constexpr uint32_t kMinusOne = twice(0xbf80), kWithSign = twice(0xff80), kWithoutSign = twice(0xff7f);
  first = select_bytes(four, kUpper, kLowerFirstTwo);
  last = select_bytes(four, kUpper, kLowerLastTwo);
  for (uint32_t* pair : {&first, &last})
    *pair = fma_pair(*pair & kWithSign, kMinusOne, *pair & kWithoutSign, Type<BFloat16>{});
}

// Eight stored numbers, widened to a row of a panel.
template <class Storage, class Stored>
SCALEDOT_DEVICE void widen_eight(uint32_t first, uint32_t last, Storage* to, Type<Stored> type) {
  AlignedVector<uint32_t, 4> pairs;
  widen_four(first, pairs.x[0], pairs.x[1], type, Type<Storage>{});
  widen_four(last, pairs.x[2], pairs.x[3], type, Type<Storage>{});
  shared_store(reinterpret_cast<AlignedVector<uint32_t, 4>*>(to), pairs);
}
template <class Stored>
SCALEDOT_DEVICE void widen_eight(uint32_t first, uint32_t last, float* to, Type<Stored> type) {
  for (int k = 0; k < 2; ++k) {
    uint32_t pairs[2];
    float16_pairs(k == 0 ? first : last, pairs[0], pairs[1], type);
    AlignedVector<float, 4> four;
    widen_pair(pairs[0], four.x[0], four.x[1]);
    widen_pair(pairs[1], four.x[2], four.x[3]);
    shared_store(reinterpret_cast<AlignedVector<float, 4>*>(to) + k, four);
  }
}

}  // namespace
}  // namespace scaledot
