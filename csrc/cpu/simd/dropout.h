// The dropout words of core/philox.h, many counters at a time: the same words for groups of 64 columns, in vectors.
//
// A vector of 64-bit lanes holds one 32-bit word of each counter in the low half of a lane. A multiplication reads only
// the low halves. The high halves may therefore hold the rest of a product until the last round.
#pragma once

#include "core/philox.h"
#include "cpu/simd/vec.h"

namespace scaledot {
namespace {

using Wide = Native<uint64_t>;
constexpr int kWideLanes = kVectorBytes / int(sizeof(uint64_t));

SCALEDOT_INLINE Wide wide(uint64_t x) { return Wide{} + x; }

// 0, 2, 4, ...
SCALEDOT_INLINE Wide even_numbers() {
  Wide numbers;
#pragma GCC unroll 8
  for (int l = 0; l < kWideLanes; ++l) numbers[l] = uint64_t(2 * l);
  return numbers;
}

// The keys of all rounds. Computed once for many rows: vectors then read them from memory, which is free beside the
// arithmetic. Made of registers, they would cost as much as two rounds.
struct PhiloxKeys {
  uint64_t key0[kPhiloxRounds], key1[kPhiloxRounds];

  void set(const DropoutRow& r) {
    for (uint32_t round = 0; round < kPhiloxRounds; ++round) {
      key0[round] = r.key0 + round * kWeyl0;
      key1[round] = r.key1 + round * kWeyl1;
    }
  }
};

// The counters of a row's columns differ in word 0 only, so half of the first two rounds is the same for all columns.
struct PhiloxRow {
  const PhiloxKeys& keys;
  uint64_t word2;     // mixed into word 2 by the first round
  uint64_t words[3];  // the second round: mixed into words 0 and 2; word 3 itself

  SCALEDOT_INLINE PhiloxRow(const DropoutRow& r, const PhiloxKeys& of_seed) : keys(of_seed) {
    uint32_t c[4] = {0, r.row, r.head, r.offset};  // word 0 is 0, and so is its product: the shared parts remain
    philox_round(c[0], c[1], c[2], c[3], r.key0, r.key1);
    word2 = c[2];
    const uint64_t product = uint64_t(kPhiloxMultiplier0) * c[0];
    words[0] = c[1] ^ uint32_t(keys.key0[1]);
    words[1] = product >> 32 ^ uint32_t(keys.key1[1]);
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

// Vectors of counters that are computed together: their multiplications overlap.
constexpr int kPhiloxVectors = 4;
constexpr int kPhiloxColumns = kPhiloxVectors * 4 * kWideLanes;  // a counter makes 4 words

// Words that dropout_words() may write for this many columns.
inline int64_t dropout_room(int64_t columns) {
  return round_up(round_up(columns, int64_t(kDropoutGroup)), int64_t(kPhiloxColumns));
}

// Writes the words of columns [64 * group, 64 * group + columns), rounded up to dropout_room(columns).
inline void dropout_words(const PhiloxRow& row, int64_t group, int64_t columns, uint32_t* words) {
  constexpr int kPair = 2 * kWideLanes;
  columns = round_up(columns, int64_t(kDropoutGroup));  // the words of a counter belong to columns 16 apart
  for (int64_t column = 0; column < columns; column += kPhiloxColumns) {
    PhiloxVectors v[kPhiloxVectors];  // in twos: counters n, n + 2, ... and n + 1, n + 3, ...
    uint32_t* to[kPhiloxVectors / 2];
#pragma GCC unroll 2
    for (int k = 0; k < kPhiloxVectors / 2; ++k) {
      const int64_t n = column / 4 + k * kPair;
      const Wide first = wide(uint64_t(group * kDropoutLanes + n)) + even_numbers();
      v[2 * k].begin(row, first);
      v[2 * k + 1].begin(row, first + 1);
      to[k] = words + n / kDropoutLanes * kDropoutGroup + n % kDropoutLanes;
    }
#pragma GCC unroll 8
    for (int round = 2; round < kPhiloxRounds; ++round)
#pragma GCC unroll 4
      for (PhiloxVectors& one : v) one.round(row.keys.key0[round], row.keys.key1[round]);
#pragma GCC unroll 2
    for (int k = 0; k < kPhiloxVectors / 2; ++k)
#pragma GCC unroll 4
      for (int w = 0; w < 4; ++w) {
        const Wide joined = (v[2 * k].c[w] & wide(0xffffffffu)) | (v[2 * k + 1].c[w] << 32);
        *reinterpret_cast<Loose<uint64_t, kWideLanes>*>(to[k] + w * kDropoutLanes) = joined;
      }
  }
}

// Lanes whose word is at least `threshold`.
template <class T>
SCALEDOT_INLINE Mask<T> words_at_least(const uint32_t* words, uint32_t threshold) {
  return {as_lanes<T>(words) >= (Native<typename Lanes<T>::word>{} + threshold)};
}

}  // namespace
}  // namespace scaledot
