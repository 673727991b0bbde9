// The words of core/philox.h for a group of 64 columns, in vectors: the same numbers, many counters at a time.
//
// A vector of 64-bit lanes holds one 32-bit word of as many counters in the low halves of its lanes. The multiplication reads the low
// halves only, so what a round leaves in the high halves (that of a product) does no harm until the end.
#pragma once

#include "core/philox.h"
#include "cpu/simd/vec.h"

namespace scaledot {
namespace {

using Wide = Native<uint64_t>;
constexpr int kWideLanes = kVectorBytes / int(sizeof(uint64_t));

SCALEDOT_INLINE Wide wide(uint64_t x) { return Wide{} + x; }

struct PhiloxVectors {
  Wide c[4];

  SCALEDOT_INLINE void round(uint64_t key0, uint64_t key1) {
    const Wide product0 = multiply_words(c[0], wide(kPhiloxMultiplier0)),
               product1 = multiply_words(c[2], wide(kPhiloxMultiplier1));
    c[0] = exclusive_or(product1 >> 32, c[1], wide(key0));
    c[1] = product1;
    c[2] = exclusive_or(product0 >> 32, c[3], wide(key1));
    c[3] = product0;
  }
};

// The keys of the rounds, of one seed.
struct PhiloxKeys {
  uint64_t key0[kPhiloxRounds], key1[kPhiloxRounds];

  SCALEDOT_INLINE explicit PhiloxKeys(const DropoutRow& r) {
    for (uint32_t round = 0; round < kPhiloxRounds; ++round) {
      key0[round] = r.key0 + round * kWeyl0;
      key1[round] = r.key1 + round * kWeyl1;
    }
  }
};

// words[k]: that of column 64 * group + k.
inline void dropout_words(const DropoutRow& r, const PhiloxKeys& keys, int64_t group, uint32_t* words) {
  for (int lane = 0; lane < kDropoutLanes; lane += 2 * kWideLanes) {
    uint64_t counters[kWideLanes];
    for (int l = 0; l < kWideLanes; ++l) counters[l] = uint64_t(group * kDropoutLanes + lane + 2 * l);
    const Wide first = *reinterpret_cast<const Loose<uint64_t, kWideLanes>*>(counters);
    // Counters lane, lane + 2, ... and lane + 1, lane + 3, ...
    PhiloxVectors even = {{first, wide(r.row), wide(r.plane), wide(r.offset)}}, odd = even;
    odd.c[0] += 1;
#pragma GCC unroll 10
    for (int round = 0; round < kPhiloxRounds; ++round) {
      even.round(keys.key0[round], keys.key1[round]);
      odd.round(keys.key0[round], keys.key1[round]);
    }
    for (int w = 0; w < 4; ++w) {
      const Wide joined = (even.c[w] & wide(0xffffffffu)) | (odd.c[w] << 32);
      *reinterpret_cast<Loose<uint64_t, kWideLanes>*>(words + w * kDropoutLanes + lane) = joined;
    }
  }
}

// Lanes whose word is at least `least`.
template <class T>
SCALEDOT_INLINE Mask<T> words_at_least(const uint32_t* words, uint32_t least) {
  using Word = typename Lanes<T>::word;
  const Small<uint32_t, kLanes<T>> some = *reinterpret_cast<const Loose<uint32_t, kLanes<T>>*>(words);
  return {__builtin_convertvector(some, Native<Word>) >= (Native<Word>{} + least)};
}

}  // namespace
}  // namespace scaledot
