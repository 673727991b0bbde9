// Scores, online softmax and dropout for the 16 rows of a warp, in registers.
//
//   m' = max(m, rowmax S)      P = exp(S - m')      l' = l exp(m - m') + rowsum P
//
// Online softmax: Milakov and Gimelshein 2018.
#pragma once

#include "cuda/generic/scores.cuh"

namespace scaledot {
namespace {

// Whether the rows of a thread's first (0) or second (1) half do not exist, in any lane.
template <class C>
SCALEDOT_DEVICE bool no_row_in_half(const StackedTile& tile, int half) {
  return C::kDecode && 8 * half >= tile_rows(tile);
}

// Replaces the dot products of one half of a thread's elements by scores. Returns the bits of its masked ones.
template <class C, int kColumnWarps, class T>
SCALEDOT_DEVICE uint32_t finish_half(const Problem& p, const ScoreOptions<T>& options, const ThreadRow<T>& row,
                                     Range keys, uint32_t shown, int half,
                                     T (&s)[ScoreLayout<C, kColumnWarps>::kTiles][4]) {
  using L = ScoreLayout<C, kColumnWarps>;
  uint32_t masked = 0;
  MaskElements<T> elements = {};
#pragma unroll
  for (int n = 0; n < L::kTiles; ++n) {
    if (n % kMaskGroups == 0) load_mask_row<L>(p, row, keys, n, elements);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int e = 2 * half + j;
      const Score<T> x = score(p, options, row, keys, L::key(n, j), s[n][e], elements[n % kMaskGroups * 2 + j],
                               shown >> (2 * n + j) & 1);
      s[n][e] = x.value;
      masked |= uint32_t(x.state == kMasked) << (4 * n + e);
    }
  }
  return masked;
}
// Does what finish_half does in a loop of small code: the elements move on by one place in each step.
template <class C, int kColumnWarps, class T>
SCALEDOT_DEVICE uint32_t finish_half_in_loop(const Problem& p, const ScoreOptions<T>& options, const ThreadRow<T>& row,
                                             Range keys, uint32_t shown, int half,
                                             T (&s)[ScoreLayout<C, kColumnWarps>::kTiles][4]) {
  using L = ScoreLayout<C, kColumnWarps>;
  constexpr int kElements = 2 * L::kTiles, kLoaded = C::kQuantised ? 2 * kMaskGroups : kElements;
  uint32_t masked = 0;
  T elements[kLoaded] = {};
#pragma unroll 1
  for (int k = 0; k < kElements; ++k) {
    const int n = k / 2, j = k % 2;
    if (k % kLoaded == 0) load_mask_row<L>(p, row, keys, n, elements);
    const Score<T> x = score(p, options, row, keys, L::key(n, j), s[0][2 * half], elements[0], shown >> k & 1);
    masked |= uint32_t(x.state == kMasked) << (4 * n + 2 * half + j);
#pragma unroll
    for (int to = 0; to < kLoaded - 1; ++to) elements[to] = elements[to + 1];
#pragma unroll
    for (int to = 0; to < kElements - 1; ++to) s[to / 2][2 * half + to % 2] = s[(to + 1) / 2][2 * half + (to + 1) % 2];
    s[L::kTiles - 1][2 * half + 1] = x.value;
  }
  return masked;
}

// Replaces dot products by scores, those of masked keys by -inf. Returns one bit an element: masked. A thread handles
// one of its two rows at a time, because the masks of both at once would take too many registers.
template <class C, int kColumnWarps, class T>
SCALEDOT_DEVICE uint32_t finish_scores(const Problem& p, const StackedTile& tile, const ScoreOptions<T>& options,
                                       Range keys, T (&s)[ScoreLayout<C, kColumnWarps>::kTiles][4]) {
  using L = ScoreLayout<C, kColumnWarps>;
  uint32_t masked = 0;
  // Packed sequences have no registers for a second way, but decode has.
  if ((C::kDecode || !C::kPacked) && !options.caps && !options.masks && !options.looks_up) {
#pragma unroll
    for (int n = 0; n < L::kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] *= options.scale;
    return masked;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (no_row_in_half<C>(tile, half)) break;
    const ThreadRow<T> row = thread_row<T>(p, tile, L::row(half), keys);
    const uint32_t shown = shown_bits<L>(p, options, tile, row, keys);
    if constexpr (C::kDecode) {
      const uint32_t of_half = finish_half_in_loop<C, kColumnWarps>(p, options, row, keys, shown, half, s);
      if (row.exists) masked |= of_half;  // others are not stored, so their values may be anything
    } else {
      masked |= finish_half<C, kColumnWarps>(p, options, row, keys, shown, half, s);
    }
  }
  return masked;
}

// exp(m - m') for the thread's two rows.
template <class C, class T>
struct Rescale {
  T factor[2];
};

SCALEDOT_DEVICE float highest_of(float a, float b) { return fast_max(a, b); }
SCALEDOT_DEVICE double highest_of(double a, double b) { return max(a, b); }

// Updates the rows' maxima m and sums l with the scores s, and replaces s by P. Returns the factors by which earlier
// sums must be multiplied. The four lanes that share two rows get the same values.
template <class C, class T>
SCALEDOT_DEVICE Rescale<C, T> exponentiate(const StackedTile& tile, RowState<T> (&state)[2],
                                           T (&s)[ScoreLayout<C, kForwardColumnWarps>::kTiles][4]) {
  using L = ScoreLayout<C, kForwardColumnWarps>;
  Rescale<C, T> result;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    result.factor[half] = T(1);
    if (no_row_in_half<C>(tile, half)) break;
    T highest = state[half].maximum;
#pragma unroll
    for (int n = 0; n < L::kTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) highest = highest_of(highest, s[n][2 * half + j]);
    highest = highest_of(highest, shuffle_xor(highest, 1));
    highest = highest_of(highest, shuffle_xor(highest, 2));
    const T factor = highest == state[half].maximum ? T(1) : weight_exp<C>(state[half].maximum - highest);
    const T base = shift(highest);
    T sum = T(0);
#pragma unroll
    for (int n = 0; n < L::kTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        T& x = s[n][2 * half + j];
        x = weight_exp<C>(rounded_subtract(x, base));
        sum += x;
      }
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    state[half] = {highest, state[half].sum * factor + sum};
    result.factor[half] = factor;
  }
  return result;
}

// Multiplies earlier sums by their factors.
template <class C, class T, int kTiles>
SCALEDOT_DEVICE void rescale(const Rescale<C, T>& by, T (&sums)[kTiles][4]) {
  // Maxima seldom change after the first tiles.
  if (C::kDecode && by.factor[0] == T(1) && by.factor[1] == T(1)) return;
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[n][e] *= by.factor[e / 2];
}

// Dropped weights become 0; NaN stays NaN.
template <class L, class T>
SCALEDOT_DEVICE void apply_dropout(const Problem& p, const StackedTile& tile, Range keys, T (&s)[L::kTiles][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t keep_mask = keep_mask_bits<L>(p, tile, thread_row<T>(p, tile, L::row(half), keys), keys);
#pragma unroll
    for (int n = 0; n < L::kTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (!(keep_mask >> (2 * n + j) & 1)) s[n][2 * half + j] *= T(0);
  }
}

}  // namespace
}  // namespace scaledot
