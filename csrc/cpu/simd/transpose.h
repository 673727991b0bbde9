// A square of kLanes vectors: its transpose, and the sum of each vector. Both take log2(kLanes) rounds. In each round
// pairs of vectors exchange the lanes that are `distance` apart.
#pragma once

#include "cpu/simd/vec.h"

namespace scaledot {
namespace {

// Shuffles of two vectors a and b, whose lanes are numbered 0 to kLanes - 1 (a) and from kLanes on (b):
//   low   a[l] where the bit `distance` of l is 0, b[l - distance] where it is 1
//   high  a[l + distance] where it is 0, b[l] where it is 1
template <class T>
struct Exchange {
  using Words = Native<typename Lanes<T>::word>;
  Words low, high;

  SCALEDOT_INLINE explicit Exchange(int distance) {
#pragma GCC unroll 16
    for (int l = 0; l < kLanes<T>; ++l) {
      low[l] = typename Lanes<T>::word(l & distance ? kLanes<T> + l - distance : l);
      high[l] = typename Lanes<T>::word(l & distance ? kLanes<T> + l : l + distance);
    }
  }
};

// Rows become columns. V is any vector of kLanes<T> lanes, each as wide as T.
template <class T, class V>
SCALEDOT_INLINE void transpose(V* square) {
  using Words = Native<typename Lanes<T>::word>;
#pragma GCC unroll 4
  for (int distance = 1; distance < kLanes<T>; distance *= 2) {
    const Exchange<T> lanes(distance);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<T>; ++i) {
      if (i & distance) continue;
      const Words a = Words(square[i].v), b = Words(square[i + distance].v);
      square[i].v = (decltype(square[i].v))(shuffle(a, b, lanes.low));
      square[i + distance].v = (decltype(square[i].v))(shuffle(a, b, lanes.high));
    }
  }
}

// Lane i of the result is the sum of the lanes of vector i.
template <class T>
SCALEDOT_INLINE Vec<T> sums_of(Vec<T> (&square)[kLanes<T>]) {
#pragma GCC unroll 4
  for (int distance = 1; distance < kLanes<T>; distance *= 2) {
    const Exchange<T> lanes(distance);
#pragma GCC unroll 8
    for (int i = 0; i < kLanes<T>; i += 2 * distance) {
      const Native<T> a = square[i].v, b = square[i + distance].v;
      square[i].v = shuffle(a, b, lanes.low) + shuffle(a, b, lanes.high);
    }
  }
  return square[0];
}

}  // namespace
}  // namespace scaledot
