// From dot products to weights, in the registers of a thread. core/mask.h defines what a score is.
//
// A lane holds scores of two rows: element [n][e] belongs to row row(e / 2) and key key(n, e % 2) of the tile.
#pragma once

#include "core/philox.h"
#include "core/softmax.h"
#include "cuda/generic/product.cuh"
#include "cuda/ptx/convert.h"

namespace scaledot {
namespace {

// Which elements of a tile of scores each thread holds.
template <class C, int kColumnWarps>
struct ScoreLayout {
  static constexpr int kTiles = C::kKeys / 8 / kColumnWarps;
  static constexpr int kKeys = C::kKeys / kColumnWarps;  // of a warp

  // warp_*: the first row and key of the thread's warp.
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
  // The column of element (n, j) among the columns of any product of this warp.
  static SCALEDOT_MEMBER int column(int n, int j) { return column_of(thread_index(), n, j); }
};

// Options that turn the dot products of a tile into scores and weights.
template <class T>
struct ScoreOptions {
  T scale, softcap, masked_score, dropout_scale;
  bool caps, drops;
  bool masks;                  // some score may be masked or replaced
  bool looks_up;               // attn_mask, alibi_slopes or relative_bias is given
  bool blocks = false;         // the block mask may hide a key
  bool relative_bias = false;  // it is given
  // Where its entries begin, of the tile's batch entry. A packed sequence is a batch of one.
  int64_t relative_start = 0;
};

// The scale of dot products: of quantised keys with theirs.
template <class C>
SCALEDOT_DEVICE typename C::T score_scale(const Problem& p, const StackedTile& tile) {
  using T = typename C::T;
  if constexpr (C::kQuantised)
    return T(p.scale * cache_scale(p, p.k_scale, tile.batch, tile.kv_head));
  else
    return T(p.scale);
}

// `whole`: no score is masked by position, or because its row or key does not exist.
template <class C>
SCALEDOT_DEVICE ScoreOptions<typename C::T> score_options(const Problem& p, const StackedTile& tile, Range keys,
                                                          bool whole) {
  using T = typename C::T;
  const bool relative = C::kRelativeBias && p.relative_bias.data;
  const bool looks_up = p.attn_mask.data || p.alibi_slopes.data || relative;
  const bool blocks = !C::kPacked && block_tile_kind(p, tile.batch, heads_of(tile), tile.rows, keys) != TileKind::full;
  const bool masked = blocks || p.attn_mask.data || relative;
  return {.scale = score_scale<C>(p, tile),
          .softcap = T(p.softcap),
          .masked_score = T(p.masked_score),
          .dropout_scale = T(dropout_scale(p)),
          .caps = p.softcap > 0,
          .drops = p.dropout_p > 0,
          .masks = !whole || masked,
          .looks_up = looks_up,
          .blocks = blocks,
          .relative_bias = relative,
          .relative_start = !C::kPacked && relative ? offset(p, p.relative_bias, tile.batch, 0) : 0};
}

template <class C>
SCALEDOT_DEVICE ScoreOptions<typename C::T> score_options(const Problem& p, const StackedTile& tile, Range keys) {
  const bool exist = tile_rows(tile) == C::kRows && count(keys) == C::kKeys;
  return score_options<C>(p, tile, keys, exist && tile_kind(p, tile.rows, keys) == TileKind::full);
}

// One row of the tile, for a thread that holds scores of it.
template <class T>
struct ThreadRow {
  bool exists;  // false: past the last row of the tile
  int head;
  int64_t i;
  int live_begin, live_end;  // the keys of the tile that it may attend to by position
  RowMask<T> mask;
};

template <class T>
SCALEDOT_DEVICE ThreadRow<T> thread_row(const Problem& p, const StackedTile& tile, int r, Range keys) {
  ThreadRow<T> row = {r < tile_rows(tile), 0, 0, 0, 0, {}};
  if (!row.exists) return row;
  const int rows = int(count(tile.rows));
  row.head = tile.first_head + r / rows;
  row.i = tile.rows.begin + r % rows;
  row.mask = row_mask<T>(p, tile.batch, row.head, row.i);
  const Range live = intersect({row.mask.live.begin, row.mask.live.end}, keys);
  row.live_begin = int(min(live.begin, keys.end) - keys.begin);
  row.live_end = int(max(live.end, keys.begin) - keys.begin);
  return row;
}

// Quantised keys and values have no backward.
template <class C>
constexpr bool kSavesOutputLow = sizeof(typename C::Storage) == 2 && !C::kQuantised;

// The row's number among all rows of the problem; for packed sequences, among the rows of all sequences.
template <class T>
SCALEDOT_DEVICE int64_t row_number(const Problem& p, const StackedTile& tile, const ThreadRow<T>& row) {
  return p.heads * p.first_row + (int64_t(tile.batch) * p.heads + row.head) * p.query_length + row.i;
}

// Which keys of a row the block mask shows: bit 2n + j for key(n, j).
template <class L, class T>
SCALEDOT_DEVICE uint32_t shown_bits(const Problem& p, const ScoreOptions<T>& options, const StackedTile& tile,
                                    const ThreadRow<T>& row, Range keys) {
  if (!options.blocks || !row.exists) return ~uint32_t(0);
  const int64_t start = offset(p, p.blocks, tile.batch, row.head);
  uint32_t bits = 0;
#pragma unroll 1
  for (int k = 0; k < 2 * L::kTiles; ++k) {
    const int64_t key = keys.begin + L::key(k / 2, k % 2);
    bits |= uint32_t(key < keys.end && block_allows(p, start, row.i, key)) << k;
  }
  return bits;
}

// relative_bias for key j. Its entries have the type of scores.
template <class T>
SCALEDOT_DEVICE T relative_bias(const Problem& p, const ScoreOptions<T>& options, const ThreadRow<T>& row, int64_t j) {
  const T* entries = static_cast<const T*>(p.relative_bias.data) + options.relative_start;
  return global_load(entries + row.head * p.relative_bias.head_stride + relative_entry(p, row.mask, j));
}

template <class T>
struct Score {
  T value;
  T slope;  // d value / d (scale * dot product)
  uint8_t state;
};

// Groups of 8 keys whose mask elements a thread loads at a time: more would take more registers than there are. A few
// kernels have them (kLoaded in softmax.cuh).
constexpr int kMaskGroups = 1;
template <class T>
using MaskElements = T[2 * kMaskGroups];  // [2n + j]: of key(group + n, j)

// Loads attn_mask's elements of a row, from group `group` on, before the first of them is used: otherwise each would
// wait for memory. Those of keys that the row may not attend to are not loaded.
template <class L, class T, int kElements>
SCALEDOT_DEVICE void load_mask_row(const Problem& p, const ThreadRow<T>& row, Range keys, int group,
                                   T (&elements)[kElements]) {
  const TensorView& mask = p.attn_mask;
  if (!mask.data) return;
  const int begin = int(max<int64_t>(row.live_begin, p.mask_begin - keys.begin)), end = row.live_end;
  const T none = neutral_element<T>(p);
  with_elements<T>(mask.data, mask.dtype, [&](const auto& from) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const int k = L::key(group + e / 2, e % 2);
      elements[e] = k < begin || k >= end ? none : from(row.mask.start + (keys.begin + k) * mask.col_stride);
    }
  });
}

// `element`: of attn_mask.
template <class T>
SCALEDOT_DEVICE Score<T> score(const Problem& p, const ScoreOptions<T>& options, const ThreadRow<T>& row, Range keys,
                               int k, T dot, T element, bool shown = true) {
  Score<T> s = {dot * options.scale, T(1), kLive};
  if (options.caps) {
    s.value = capped(s.value, options.softcap);
    s.slope = capped_slope(s.value, options.softcap);
  }
  if (options.masks && (k < row.live_begin || k >= row.live_end || !shown)) {
    s.state = kMasked;
  } else if (options.looks_up) {
    const int64_t j = keys.begin + k;
    T additive = alibi_bias(row.mask, j);
    if (options.relative_bias) additive = rounded_add(additive, relative_bias(p, options, row, j));
    if (adds_mask(p)) additive = rounded_add(additive, element);
    s.state = key_state(p, row.mask, j, element, mask_use(p).additive, additive);
    s.value = rounded_add(s.value, additive);
    if (s.state == kReplaced) s.value = options.masked_score;
  }
  if (s.state == kMasked) s.value = -T(__builtin_inf());
  if (s.state != kLive) s.slope = T(0);
  return s;
}

// exp for weights: in full precision for float32 and float64; the hardware's approximation for weights that are rounded
// to 16 bits.
template <class C>
SCALEDOT_DEVICE typename C::T weight_exp(typename C::T x) {
  if constexpr (C::kDecode)
    return flushed_exp2(x * float(kLog2e));
  else if constexpr (C::kTensorCores)
    return fast_exp2(x * float(kLog2e));
  else
    return exp(x);
}

// The keep mask of a row: bit 2n + j for the weight at key(n, j).
template <class L, class T>
SCALEDOT_DEVICE uint32_t keep_mask_bits(const Problem& p, const StackedTile& tile, const ThreadRow<T>& row,
                                        Range keys) {
  if (!row.exists) return 0;
  const DropoutRow stream = dropout_row(p, tile.batch, row.head, row.i);
  const int64_t column = stream.first_column + keys.begin, group = column / kDropoutGroup;
  const int first = int(column % kDropoutGroup);
  // A tile overlaps two groups of columns only if the call is part of a larger attention.
  const int groups = first + int(keys.end - keys.begin) > kDropoutGroup ? 2 : 1;
  uint32_t bits = 0;
  // Not unrolled: the words of four counters would take as many registers as the accumulators.
#pragma unroll 1
  for (int step = 0; step < 4 * groups; ++step) {
    const int j = step % 2, parity = step / 2 % 2, crossed = step / 4;
    // Keys 16 apart (every second n) share a counter.
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

// A weight or score gradient as an operand of the next product: -0 if masked, never -0 otherwise (is_skip).
template <class Storage, class T>
SCALEDOT_DEVICE Storage operand(T x, bool masked) {
  Storage narrowed;
  narrow(masked ? T(-0.0) : x, narrowed);
  return !masked && is_skip(narrowed) ? Storage{} : narrowed;
}

// Stores a thread's elements into a tile of scores. Bit 4n + e of `masked`: element [n][e] is masked.
template <class C, int kColumnWarps, class T>
SCALEDOT_DEVICE void store_tile(typename C::Storage* to, const T (&x)[ScoreLayout<C, kColumnWarps>::kTiles][4],
                                uint32_t masked, bool masks) {
  using Storage = typename C::Storage;
  using L = ScoreLayout<C, kColumnWarps>;
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
      const AlignedVector<Storage, 2> pair = {operand<Storage>(x0, masked >> (4 * n + 2 * half) & 1),
                                              operand<Storage>(x1, masked >> (4 * n + 2 * half + 1) & 1)};
      shared_store(reinterpret_cast<AlignedVector<Storage, 2>*>(at), pair);
    }
}

}  // namespace
}  // namespace scaledot
