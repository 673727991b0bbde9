// From dot products to weights, in the registers of a thread; core/mask.h says what a score is.
//
// A lane holds scores of two rows: element e of group n belongs to row row(e / 2) and key key(n, e % 2) of the tile.
#pragma once

#include "core/philox.h"
#include "core/softmax.h"
#include "cuda/generic/product.cuh"
#include "cuda/ptx/convert.h"

namespace scaledot {
namespace {

template <class C, int kColumnWarps>
struct Lane {
  static constexpr int kTiles = C::kSide / 8 / kColumnWarps;
  static constexpr int kKeys = C::kSide / kColumnWarps;  // of a warp

  // First row and key of a thread's warp, and what a thread holds.
  static SCALEDOT_HOST_DEVICE constexpr int warp_row_of(int thread) { return thread / kWarpSize % C::kRowWarps * 16; }
  static SCALEDOT_HOST_DEVICE constexpr int warp_key_of(int thread) {
    return thread / kWarpSize / C::kRowWarps * kKeys;
  }
  static SCALEDOT_HOST_DEVICE constexpr int row_of(int thread, int half) {
    return warp_row_of(thread) + mma_row(thread % kWarpSize, 2 * half);
  }
  static SCALEDOT_HOST_DEVICE constexpr int column_of(int thread, int n, int j) {
    return 8 * n + mma_column(thread % kWarpSize, j);
  }

  static SCALEDOT_MEMBER int warp_row() { return warp_row_of(thread_index()); }
  static SCALEDOT_MEMBER int warp_key() { return warp_key_of(thread_index()); }
  static SCALEDOT_MEMBER int row(int half) { return row_of(thread_index(), half); }
  static SCALEDOT_MEMBER int key(int n, int j) { return warp_key() + column(n, j); }
  // Where element (n, j) of any product of this warp stands among its columns.
  static SCALEDOT_MEMBER int column(int n, int j) { return column_of(thread_index(), n, j); }
};

// What the scores of a tile need beyond the product.
template <class T>
struct TileTerms {
  T scale, softcap, masked_score, kept;  // kept: 1 / (1 - dropout_p)
  bool caps, masks, looks_up, drops;     // masks: some element may not be live
};

template <class C>
SCALEDOT_DEVICE TileTerms<typename C::T> tile_terms(const Problem& p, const RowTile& tile, Range keys) {
  using T = typename C::T;
  const bool whole = tile_rows(tile) == C::kSide && count(keys) == C::kSide;
  const bool looks_up = p.attn_mask.data || p.alibi_slopes.data;
  return {T(p.scale),        T(p.softcap),
          T(p.masked_score), T(1.0 / (1.0 - p.dropout_p)),
          p.softcap > 0,     !whole || p.attn_mask.data || tile_kind(p, tile.rows, keys) != TileKind::full,
          looks_up,          p.dropout_p > 0};
}

// A row of the tile, as the thread that holds scores of it knows it.
template <class T>
struct ThreadRow {
  bool there;  // false: past the last row of the tile
  int head;
  int64_t i;
  int live_begin, live_end;  // keys of the tile that it attends to by position
  RowMask<T> mask;
};

template <class T>
SCALEDOT_DEVICE ThreadRow<T> thread_row(const Problem& p, const RowTile& tile, int r, Range keys) {
  ThreadRow<T> row = {r < tile_rows(tile), 0, 0, 0, 0, {}};
  if (!row.there) return row;
  const int rows = int(count(tile.rows));
  row.head = tile.first_head + r / rows;
  row.i = tile.rows.begin + r % rows;
  row.mask = row_mask<T>(p, tile.batch, row.head, row.i);
  const Range live = intersect({row.mask.live.begin, row.mask.live.end}, keys);
  row.live_begin = int(min(live.begin, keys.end) - keys.begin);
  row.live_end = int(max(live.end, keys.begin) - keys.begin);
  return row;
}

// Number of the row among all rows of the problem; of packed sequences, among those of all of them.
template <class T>
SCALEDOT_DEVICE int64_t row_number(const Problem& p, const RowTile& tile, const ThreadRow<T>& row) {
  return p.heads * p.first_row + (int64_t(tile.batch) * p.heads + row.head) * p.query_length + row.i;
}

template <class T>
struct Score {
  T value;
  T slope;  // d value / d (scale * dot product)
  uint8_t state;
};

template <class T>
SCALEDOT_DEVICE Score<T> score(const Problem& p, const TileTerms<T>& terms, const ThreadRow<T>& row, Range keys, int k,
                               T dot) {
  Score<T> s = {dot * terms.scale, T(1), kLive};
  if (terms.caps) {
    s.value = capped(s.value, terms.softcap);
    s.slope = capped_slope(s.value, terms.softcap);
  }
  if (terms.masks && (k < row.live_begin || k >= row.live_end)) {
    s.state = kMasked;
  } else if (terms.looks_up) {
    const int64_t j = keys.begin + k;
    T element = T(0), additive;
    if (p.attn_mask.data)
      element = global_element<T>(p.attn_mask.data, p.attn_mask.dtype, row.mask.start + j * p.attn_mask.col_stride);
    s.state = key_terms(p, row.mask, j, element, additive);
    s.value = rounded_add(s.value, additive);
    if (s.state == kReplaced) s.value = terms.masked_score;
  }
  if (s.state == kMasked) s.value = -T(__builtin_inf());
  if (s.state != kLive) s.slope = T(0);
  return s;
}

// exp for weights: float32 and float64 in full precision; what is rounded to 16 bits takes the hardware's.
template <class C>
SCALEDOT_DEVICE typename C::T weight_exp(typename C::T x) {
  constexpr float kLog2E = 1.4426950408889634f;
  if constexpr (C::kTensorCores)
    return fast_exp2(x * kLog2E);
  else
    return exp(x);
}

// Which of a row's elements dropout keeps: bit n * 2 + j for the one at key(n, j).
template <class L, class T>
SCALEDOT_DEVICE uint32_t kept_bits(const Problem& p, const RowTile& tile, const ThreadRow<T>& row, Range keys) {
  if (!row.there) return 0;
  const DropoutRow stream = dropout_row(p, tile.batch, row.head, row.i);
  const int64_t column = stream.first_column + keys.begin, group = column / kDropoutGroup;
  const int first = int(column % kDropoutGroup);
  // A tile crosses a group only where the call is part of a larger attention.
  const int groups = first + int(keys.end - keys.begin) > kDropoutGroup ? 2 : 1;
  uint32_t bits = 0;
  // One counter after the other: four at once would take as many registers as the sums of the products.
#pragma unroll 1
  for (int step = 0; step < 4 * groups; ++step) {
    const int j = step % 2, parity = step / 2 % 2, crossed = step / 4;
    // Keys 16 apart, which every second n brings, share a counter.
    const PhiloxWords words = dropout_words(stream, group + crossed, (first + L::key(parity, j)) % kDropoutLanes);
#pragma unroll
    for (int n = parity; n < L::kTiles; n += 2) {
      const int which = (first + L::key(n, j)) / kDropoutLanes - 4 * crossed;
      if (which < 0 || which > 3) continue;
      const uint32_t word = which == 0   ? words.word[0]
                            : which == 1 ? words.word[1]
                            : which == 2 ? words.word[2]
                                         : words.word[3];
      bits |= uint32_t(word >= stream.threshold) << (2 * n + j);
    }
  }
  return bits;
}

// One number of a tile of weights or score gradients: masked ones become -0, live ones never (product.cuh).
template <class Storage, class T>
SCALEDOT_DEVICE Storage operand(T x, bool masked) {
  Storage narrowed;
  narrow(masked ? T(-0.0) : x, narrowed);
  return !masked && is_skip(narrowed) ? Storage{} : narrowed;
}

// Stores a thread's elements into a tile of scores. Bit 4n + e of `masked`: element e of group n.
template <class C, int kColumnWarps, class T>
SCALEDOT_DEVICE void store_tile(typename C::Storage* to, const T (&x)[Lane<C, kColumnWarps>::kTiles][4],
                                uint32_t masked, bool masks) {
  using Storage = typename C::Storage;
  using L = Lane<C, kColumnWarps>;
#pragma unroll
  for (int n = 0; n < L::kTiles; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Storage* at = to + L::row(half) * C::kScorePitch + L::key(n, 0);
      const T x0 = x[n][2 * half], x1 = x[n][2 * half + 1];
      if constexpr (C::kTensorCores) {
        if (!masks) {
          shared_store(reinterpret_cast<uint32_t*>(at), narrow_pair(x0, x1, Type<Storage>{}));
          continue;
        }
      }
      const Few<Storage, 2> pair = {operand<Storage>(x0, masked >> (4 * n + 2 * half) & 1),
                                    operand<Storage>(x1, masked >> (4 * n + 2 * half + 1) & 1)};
      shared_store(reinterpret_cast<Few<Storage, 2>*>(at), pair);
    }
}

}  // namespace
}  // namespace scaledot
