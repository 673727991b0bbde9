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

// What the counters of a row's columns share. They differ in one word, so that half of the first two rounds is the same for all.
struct PhiloxRow {
  uint64_t key0[kPhiloxRounds], key1[kPhiloxRounds];
  uint64_t word2;     // what the first round mixes into the varying part of word 2
  uint64_t words[3];  // what the second one mixes into words 0 and 2; word 3 after it

  SCALEDOT_INLINE explicit PhiloxRow(const DropoutRow& r) {
    for (uint32_t round = 0; round < kPhiloxRounds; ++round) {
      key0[round] = r.key0 + round * kWeyl0;
      key1[round] = r.key1 + round * kWeyl1;
    }
    uint32_t c[4] = {0, r.row, r.plane, r.offset};  // 0 * the multiplier is 0: these are the shared parts alone
    philox_round(c[0], c[1], c[2], c[3], uint32_t(key0[0]), uint32_t(key1[0]));
    word2 = c[2];
    const uint64_t product = uint64_t(kPhiloxMultiplier0) * c[0];
    words[0] = c[1] ^ key0[1];
    words[1] = product >> 32 ^ key1[1];
    words[2] = uint32_t(product);
  }
};

struct PhiloxVectors {
  Wide c[4];

  // After the first two rounds.
  SCALEDOT_INLINE void begin(const PhiloxRow& row, Wide column) {
    const Wide product0 = multiply_words(column, wide(kPhiloxMultiplier0));
    const Wide product1 = multiply_words(product0 >> 32 ^ wide(row.word2), wide(kPhiloxMultiplier1));
    c[0] = product1 >> 32 ^ wide(row.words[0]);
    c[1] = product1;
    c[2] = product0 ^ wide(row.words[1]);
    c[3] = wide(row.words[2]);
  }

  SCALEDOT_INLINE void round(uint64_t key0, uint64_t key1) {
    const Wide product0 = multiply_words(c[0], wide(kPhiloxMultiplier0)),
               product1 = multiply_words(c[2], wide(kPhiloxMultiplier1));
    c[0] = exclusive_or(product1 >> 32, c[1], wide(key0));
    c[1] = product1;
    c[2] = exclusive_or(product0 >> 32, c[3], wide(key1));
    c[3] = product0;
  }
};

// Vectors of counters that are worked on together, so that one's multiplications fill the time that another's take.
constexpr int kPhiloxTogether = 4;
constexpr int kPhiloxColumns = kPhiloxTogether * 4 * kWideLanes;  // that they are for

// How many words dropout_words() may write for so many columns.
inline int64_t dropout_room(int64_t columns) {
  return round_up(round_up(columns, int64_t(kDropoutGroup)), int64_t(kPhiloxColumns));
}

// words[k]: that of column 64 * group + k, of `columns` columns.
inline void dropout_words(const PhiloxRow& row, int64_t group, int64_t columns, uint32_t* words) {
  constexpr int kPair = 2 * kWideLanes;
  columns = round_up(columns, int64_t(kDropoutGroup));  // a counter's words are for columns far apart
  for (int64_t column = 0; column < columns; column += kPhiloxColumns) {
    PhiloxVectors v[kPhiloxTogether];  // each two: counters n, n + 2, ... and n + 1, n + 3, ...
    uint32_t* to[kPhiloxTogether / 2];
#pragma GCC unroll 2
    for (int k = 0; k < kPhiloxTogether / 2; ++k) {
      const int64_t n = column / 4 + k * kPair;
      Wide first = wide(uint64_t(group * kDropoutLanes + n));
      for (int l = 0; l < kWideLanes; ++l) first[l] += uint64_t(2 * l);
      v[2 * k].begin(row, first);
      v[2 * k + 1].begin(row, first + 1);
      to[k] = words + n / kDropoutLanes * kDropoutGroup + n % kDropoutLanes;
    }
#pragma GCC unroll 8
    for (int round = 2; round < kPhiloxRounds; ++round)
#pragma GCC unroll 4
      for (PhiloxVectors& one : v) one.round(row.key0[round], row.key1[round]);
#pragma GCC unroll 2
    for (int k = 0; k < kPhiloxTogether / 2; ++k)
#pragma GCC unroll 4
      for (int w = 0; w < 4; ++w) {
        const Wide joined = (v[2 * k].c[w] & wide(0xffffffffu)) | (v[2 * k + 1].c[w] << 32);
        *reinterpret_cast<Loose<uint64_t, kWideLanes>*>(to[k] + w * kDropoutLanes) = joined;
      }
  }
}

// Lanes whose word is at least `least`.
template <class T>
SCALEDOT_INLINE Mask<T> words_at_least(const uint32_t* words, uint32_t least) {
  return {as_lanes<T>(words) >= (Native<typename Lanes<T>::word>{} + least)};
}

}  // namespace
}  // namespace scaledot
