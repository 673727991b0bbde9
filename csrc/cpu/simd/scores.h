// From dot products to weights, one row of a tile at a time; forward, backward and weights all come through here.
// core/mask.h says what a score is.
#pragma once

#include "core/arena.h"
#include "core/mask.h"
#include "core/softmax.h"
#include "cpu/simd/dropout.h"
#include "cpu/simd/pack.h"

namespace scaledot {
namespace {

// Which rows a task works on: the same `count` rows of `heads` neighbouring query heads that share one key head, stacked
// (grouped-query attention with few rows would otherwise leave most of a tile empty).
struct RowTile {
  int64_t batch;
  int64_t kv_head;
  int64_t first_head;
  int64_t heads;
  Range rows;
};

// The block of a tensor's rows that a tile stands for.
template <class Storage>
inline Block<Storage> block(const Problem& p, const TensorView& view, const RowTile& tile) {
  return block<Storage>(p, view, tile.batch, tile.first_head, tile.rows.begin, tile.rows.end - tile.rows.begin);
}

inline int64_t count(Range r) { return r.end - r.begin; }
inline int64_t tile_rows(const RowTile& t) { return t.heads * count(t.rows); }
inline int64_t head_of(const RowTile& t, int64_t r) {
  return t.heads == 1 ? t.first_head : t.first_head + r / count(t.rows);
}
inline int64_t row_of(const RowTile& t, int64_t r) {
  return t.heads == 1 ? t.rows.begin + r : t.rows.begin + r % count(t.rows);
}

// How the (batch, kv_head) planes of a problem are cut into row tiles. Where there are strip tiles, `row_tiles` of `rows` rows each, the
// last ones of a head's rows first, and then, of the rows that are left, tiles of one strip each; otherwise tiles that differ by a strip
// at most.
struct Tiling {
  int64_t rows;         // per head in a tile, at most
  int64_t heads;        // per tile
  int64_t row_tiles;    // per head
  int64_t strip_tiles;  // per head
  int64_t head_tiles;   // per plane
};

enum class Cut {
  even,
  tapered,  // where tiles are few, a quarter of the rows goes into small ones: who is done first still finds some work
};
constexpr int64_t kManyTiles = 1024;

inline int64_t strips_of(int64_t rows) { return max<int64_t>(ceil_div(rows, int64_t(kStripRows)), 1); }

// `row_tiles` tiles of a head's rows, no more than there are strips, and each of as many heads as come to no more than kTileRows rows.
inline Tiling cut_evenly(const Problem& p, int64_t row_tiles, int64_t most_heads = kTileRows) {
  const int64_t group = p.heads / p.kv_heads, length = max<int64_t>(p.query_length, 1);
  const int64_t rows = min(ceil_div(strips_of(length), row_tiles) * kStripRows, length);
  const int64_t heads = min(min(group, most_heads), max<int64_t>(kTileRows / rows, 1));
  return {rows, heads, row_tiles, 0, ceil_div(group, heads)};
}

inline Tiling tile_problem(const Problem& p, Cut cut) {
  Tiling t = cut_evenly(p, ceil_div(max<int64_t>(p.query_length, 1), int64_t(kTileRows)));
  if (cut == Cut::even || t.row_tiles <= 8 || p.batch * p.kv_heads * t.head_tiles * t.row_tiles >= kManyTiles) return t;
  t.row_tiles -= ceil_div(t.row_tiles, int64_t(4));
  t.strip_tiles = ceil_div(p.query_length - t.row_tiles * t.rows, int64_t(kStripRows));
  return t;
}

inline int64_t tiles_per_plane(const Tiling& t) { return (t.row_tiles + t.strip_tiles) * t.head_tiles; }

// The even cut of which each of so many workers gets the least. What a tile costs apart from its rows is about that of a strip.
inline Tiling tile_for_workers(const Problem& p, int64_t workers) {
  const int64_t strips = strips_of(p.query_length);
  Tiling best = tile_problem(p, Cut::even);
  int64_t least = kUnbounded;
  for (int64_t in_tile = min<int64_t>(kTileRows / kStripRows, strips); in_tile > 0; --in_tile)
    for (int64_t heads = cut_evenly(p, ceil_div(strips, in_tile)).heads; heads > 0; --heads) {
      Tiling t = cut_evenly(p, ceil_div(strips, in_tile), heads);
      const int64_t abreast = p.batch * p.kv_heads * t.head_tiles, turns = ceil_div(abreast * t.row_tiles, workers);
      t = cut_evenly(p, min(turns * workers / max<int64_t>(abreast, 1), strips),
                     heads);  // of the last turn, all
      const int64_t share = turns * (round_up(t.rows * t.heads, int64_t(kStripRows)) + kStripRows);
      if (share < least) best = t, least = share;
    }
  return best;
}

// Tile `index` of a plane; later rows first, because under a causal mask they have the most keys.
inline RowTile row_tile(const Problem& p, const Tiling& t, int64_t plane, int64_t index) {
  const int64_t kv_head = plane % p.kv_heads, group = p.heads / p.kv_heads, number = index / t.head_tiles;
  const int64_t head = index % t.head_tiles * t.heads;
  // Counted from the last row, whole tiles end at multiples of t.rows; an even cut counts from the first row.
  Range rows;
  if (t.strip_tiles == 0) {
    const int64_t strips = ceil_div(p.query_length, int64_t(kStripRows)), of_head = t.row_tiles - 1 - number;
    rows = {strips * of_head / t.row_tiles * kStripRows,
            min(strips * (of_head + 1) / t.row_tiles * kStripRows, p.query_length)};
  } else if (number < t.row_tiles) {
    rows = {p.query_length - (number + 1) * t.rows, p.query_length - number * t.rows};
  } else {
    const int64_t end = p.query_length - t.row_tiles * t.rows - (number - t.row_tiles) * kStripRows;
    rows = {max<int64_t>(end - kStripRows, 0), end};
  }
  return {plane / p.kv_heads, kv_head, kv_head * group + head, min(t.heads, group - head), rows};
}

// ---------------------------------------------------------------------------------------------------- scores
// In what unit a row of scores is kept. Where a score is nothing but scale * dot product, the dot products themselves are kept, and
// the scale is left to the exponential.
template <class T>
struct Unit {
  bool raw;
  T natural;  // score = natural * what is kept
  T log2;     // score / ln 2 = log2 * what is kept
};

template <class T>
inline Unit<T> unit_of(const Problem& p) {
  const MaskUse use = mask_use(p);
  const bool replaces = use.boolean && !masked_is_excluded(p);
  const bool raw =
      p.softcap == 0 && !use.additive && !replaces && p.scale > 0;  // the largest dot product is the largest score
  return raw ? Unit<T>{true, T(p.scale), T(p.scale * kLog2e)} : Unit<T>{false, T(1), T(kLog2e)};
}

// How a tile's rows tell which keys they do not see.
enum class MaskForm {
  none,
  range,  // each row sees one range of keys; also where the tile ends inside a vector
  states  // a boolean mask: RowTerms::state says
};

// What a tile's scores need beyond dot products; decided once a tile.
struct TileTerms {
  bool raw, softcap, additive, replaced;
  MaskForm mask;
  bool full;   // by position every row sees every key
  bool alike;  // masks say the same of all rows
};

template <class T>
inline TileTerms tile_terms(const Problem& p, const RowTile& tile, Range keys) {
  const bool full = tile_kind(p, tile.rows, keys) == TileKind::full;
  const bool one_row = !p.attn_mask.row_stride && (!p.attn_mask.head_stride || tile.heads == 1);
  const bool alike = full && !p.alibi_slopes.data && (!p.attn_mask.data || one_row);
  const MaskUse use = mask_use(p);
  const bool replaced = use.boolean && !masked_is_excluded(p);
  const bool partial = !full || count(keys) % kLanes<T> != 0;
  const MaskForm mask = use.boolean ? MaskForm::states : partial ? MaskForm::range : MaskForm::none;
  return {unit_of<T>(p).raw, p.softcap > 0, use.additive, replaced, mask, full, alike};
}

// A row's mask terms for the keys of a tile; the arrays have kTileKeys elements.
template <class T>
struct RowTerms {
  T* additive_memory;
  uint8_t* state_memory;
  uint32_t* words_memory;  // dropout: whole groups of columns
  const uint32_t* words;   // in words_memory: that of the tile's first key
  const T* additive;       // in additive_memory or in the mask itself; a key to which -inf is added is masked
  const uint8_t* state;    // in state_memory or in the mask itself
  Range live;              // MaskForm::range: the keys it sees, counted from the tile's first
  uint32_t threshold;      // a weight is kept if its word is at least this
};

template <class T>
RowTerms<T> lay_out_row(Arena& arena) {
  RowTerms<T> row = {};
  row.additive_memory = take<T>(arena, kTileKeys);
  row.state_memory = take<uint8_t>(arena, kTileKeys);
  row.words_memory = take<uint32_t>(arena, dropout_room(kTileKeys + kDropoutGroup));
  return row;
}

// Lanes whose weights dropout keeps.
template <class T>
SCALEDOT_INLINE Mask<T> kept_lanes(const RowTerms<T>& row, int64_t k) {
  return words_at_least<T>(row.words + k, row.threshold);
}

// Of the keys [keys.begin, keys.end) of a key tile, those that some row of the tile sees by position. The first is a multiple of
// kDropoutGroup, so that dropout words and panels are whole.
inline Range seen_keys(const Problem& p, const RowTile& tile, Range keys) {
  const Range range = key_range(p, tile.rows);
  const int64_t begin = max<int64_t>(range.begin - keys.begin, 0) / kDropoutGroup * kDropoutGroup;
  return {keys.begin + begin, min(keys.end, range.end)};
}

// Whether positions or a boolean mask exclude the whole tile, so that nothing of it need be computed.
inline bool excluded(const Problem& p, const RowTile& tile, Range keys) {
  if (tile_kind(p, tile.rows, keys) == TileKind::skip) return true;
  const TensorView& mask = p.attn_mask;
  if (!mask_use(p).boolean || !masked_is_excluded(p)) return false;
  const int64_t heads = mask.head_stride ? tile.heads : 1, rows = mask.row_stride ? count(tile.rows) : 1;
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < rows; ++i) {
      const uint8_t* allowed = at<const uint8_t>(p, mask, tile.batch, tile.first_head + h) +
                               (tile.rows.begin + i) * mask.row_stride + keys.begin * mask.col_stride;
      uint8_t any = 0;
      for (int64_t k = 0; k < count(keys); ++k) any |= allowed[k * mask.col_stride];
      if (any) return false;
    }
  return true;
}

// How far from a tile the one lies that is visited next.
struct Ahead {
  int64_t rows, keys;
};

constexpr Ahead kNextKeys = {0, kTileKeys};

// Has what the mask says of a row of the next tile brought into the cache. Always inlined: of a function that does nothing but prefetch,
// gcc 12 finds that it has no effect, and drops the calls.
SCALEDOT_INLINE void prefetch_mask(const Problem& p, const RowTile& tile, int64_t r, Range keys, Ahead ahead) {
  const TensorView& mask = p.attn_mask;
  if (!mask.data || !mask.row_stride || mask.col_stride != 1) return;
  const int64_t size = element_size(mask.dtype), begin = keys.begin + ahead.keys;
  const char* from =
      static_cast<const char*>(mask.data) +
      size * (offset(p, mask, tile.batch, head_of(tile, r)) + (row_of(tile, r) + ahead.rows) * mask.row_stride + begin);
  for (int64_t line = 0; line < count(keys) * size; line += kCacheLine) __builtin_prefetch(from + line);
}

// The same of all rows of a tile, before the first tile of a run: there is none whose work it could go along with.
SCALEDOT_INLINE void prefetch_mask(const Problem& p, const RowTile& tile, Range keys) {
  for (int64_t r = 0; r < tile_rows(tile); ++r) prefetch_mask(p, tile, r, keys, {0, 0});
}

// The mask's own row, if it is of this dtype and can be read in whole vectors as it is; nullptr otherwise.
template <class T, class Element>
inline const Element* row_in_place(const Problem& p, const RowTile& tile, int64_t r, Range keys, DType dtype) {
  const TensorView& mask = p.attn_mask;
  if (mask.dtype != dtype || mask.col_stride != 1 || p.alibi_slopes.data || count(keys) % kLanes<T> != 0)
    return nullptr;
  return at<const Element>(p, mask, tile.batch, head_of(tile, r)) + row_of(tile, r) * mask.row_stride + keys.begin;
}
template <class T>
inline const T* additive_in_place(const Problem& p, const RowTile& tile, int64_t r, Range keys) {
  return row_in_place<T, T>(p, tile, r, keys, sizeof(T) == sizeof(double) ? DType::float64 : DType::float32);
}
// What may be attended to is kLive, which is 1, or another number that is not kMasked, which is 0.
template <class T>
inline const uint8_t* state_in_place(const Problem& p, const RowTile& tile, int64_t r, Range keys,
                                     const TileTerms& terms) {
  if (!terms.full || terms.replaced) return nullptr;
  return row_in_place<T, uint8_t>(p, tile, r, keys, DType::boolean);
}

// Fills `row` for row r of the tile. again: it was filled for another row of the tile before.
template <class T>
inline void load_terms(const Problem& p, const RowTile& tile, int64_t r, Range keys, const TileTerms& terms,
                       Ahead ahead, RowTerms<T>& row, bool again = false) {
  prefetch_mask(p, tile, r, keys, ahead);
  if (p.dropout_p > 0) {
    const DropoutRow stream = dropout_row(p, tile.batch, head_of(tile, r), row_of(tile, r));
    const PhiloxRow philox_row(stream);
    row.threshold = stream.threshold;
    // Groups begin at the tile's first key, or before it where the call is part of a larger attention.
    const int64_t first = stream.first_column + keys.begin, before = first % kDropoutGroup;
    row.words = row.words_memory + before;
    dropout_words(philox_row, (first - before) / kDropoutGroup, before + count(keys), row.words_memory);
  }
  if (again && terms.alike) return;
  if (terms.mask == MaskForm::range) {
    const Range live = intersect(row_keys(p, row_of(tile, r)), keys);
    row.live = {live.begin - keys.begin, max(live.end, live.begin) - keys.begin};
  }
  const bool states = terms.mask == MaskForm::states;
  if (!states && !terms.additive) return;
  row.additive = states ? nullptr : additive_in_place<T>(p, tile, r, keys);
  row.state = states ? state_in_place<T>(p, tile, r, keys, terms) : nullptr;
  if (row.additive || row.state) return;
  row.additive = row.additive_memory;
  row.state = row.state_memory;
  row_terms<T>(p, tile.batch, head_of(tile, r), row_of(tile, r), keys, row.additive_memory,
               states ? row.state_memory : nullptr);
  for (int64_t k = count(keys); k % kLanes<T> != 0; ++k) {
    row.state_memory[k] = kMasked;
    row.additive_memory[k] = T(0);
  }
}

// The vectors of a row in which it sees anything.
template <class T>
inline Range seen_vectors(const TileTerms& terms, const RowTerms<T>& row, Range keys) {
  const int64_t lanes = kLanes<T>, all = round_up(count(keys), lanes);
  if (terms.mask != MaskForm::range) return {0, all};
  if (row.live.end <= row.live.begin) return {0, 0};
  return {row.live.begin / lanes * lanes, round_up(row.live.end, lanes)};
}

// Dot products to what is kept of kLanes scores, masks apart; *slope is d score / d (scale * dot product), before masks.
template <class T>
SCALEDOT_INLINE Vec<T> score(const Problem& p, const TileTerms& terms, const RowTerms<T>& row, int64_t k, Vec<T> dot,
                             Vec<T>* slope) {
  if (slope) *slope = Vec<T>(T(1));
  if (terms.raw) return dot;
  Vec<T> s = dot * Vec<T>(T(p.scale));
  if (terms.softcap) {
    s = capped(s, T(p.softcap));
    if (slope) *slope = capped_slope(s, T(p.softcap));
  }
  if (terms.additive) {
    const Vec<T> bias = load(row.additive + k), masked(-T(__builtin_inf()));
    s = select(bias == masked, masked, s + bias);
  }
  if (terms.replaced) {
    const Mask<T> replaced = bytes_equal<T>(row.state + k, kReplaced);
    s = select(replaced, Vec<T>(T(p.masked_score)), s);
    if (slope) *slope = select(replaced, Vec<T>(T(0)), *slope);
  }
  return s;
}

// Dot products to scores, in place; masked ones become -inf. `slopes`: see score(); nullptr if not wanted.
template <class T>
inline void finish_scores(const Problem& p, const TileTerms& terms, const RowTerms<T>& row, Range keys, T* scores,
                          T* slopes) {
  const Range seen = seen_vectors(terms, row, keys);
  if (!terms.raw)
    for (int64_t k = seen.begin; k < seen.end; k += kLanes<T>) {
      Vec<T> slope;
      store(scores + k, score(p, terms, row, k, load(scores + k), slopes ? &slope : nullptr));
      if (slopes) store(slopes + k, slope);
    }
  const Vec<T> masked(-T(__builtin_inf()));
  if (terms.mask == MaskForm::states) {
    for (int64_t k = seen.begin; k < seen.end; k += kLanes<T>)
      store(scores + k, select(bytes_equal<T>(row.state + k, kMasked), masked, load(scores + k)));
  } else if (terms.mask == MaskForm::range) {
    for (int64_t k = seen.begin; k < row.live.begin; ++k) scores[k] = -T(__builtin_inf());
    for (int64_t k = row.live.end; k < seen.end; ++k) scores[k] = -T(__builtin_inf());
  }
}

// Puts kSkip at masked positions of a row of weights or gradients, and makes a live -0 a 0. Needed only where what they are multiplied
// with is not finite. Number k of the row is at first[k * step].
template <class T, class Number>
inline void mark_masked(const TileTerms& terms, const RowTerms<T>& row, Range keys, Number* first, int64_t step) {
  const int64_t end = round_up(count(keys), int64_t(kLanes<T>));  // an operand may reach past the last key
  for (int64_t k = 0; k < end; ++k) {
    const bool masked = k >= count(keys) ||
                        (terms.mask == MaskForm::range && (k < row.live.begin || k >= row.live.end)) ||
                        (terms.mask == MaskForm::states && row.state[k] == kMasked) ||
                        (terms.additive && row.additive[k] == -T(__builtin_inf()));
    const T x = T(widen(first[k * step]));
    narrow(masked ? kSkip<T> : x == T(0) ? T(0) : x, first[k * step]);
  }
}

// ---------------------------------------------------------------------------------------------------- softmax
// The online softmax of a tile's rows (core/softmax.h), in the unit of their scores. A row's reference is a score near its maximum
// which every score is compared with: it is raised only when one exceeds it by kSlack, so that what was summed under the old one is
// rescaled seldom. Sums of weights are kept by lanes.
template <class T>
struct SoftmaxRows {
  T* reference;  // -inf: nothing seen yet
  T* limit;      // above which the reference is raised
  T* sum;        // kLanes each
};
constexpr double kSlack = 8;  // weights stay below 2^8

template <class T>
SoftmaxRows<T> lay_out_softmax(Arena& arena, int64_t rows) {
  return {take<T>(arena, rows), take<T>(arena, rows), take<T>(arena, rows * kLanes<T>)};
}

template <class T>
inline SoftmaxRows<T> from_row(const SoftmaxRows<T>& rows, int64_t r) {
  return {rows.reference + r, rows.limit + r, rows.sum + r * kLanes<T>};
}

template <class T>
inline void reset(const SoftmaxRows<T>& rows, int64_t r) {
  rows.reference[r] = rows.limit[r] = -T(__builtin_inf());
  store(rows.sum + r * kLanes<T>, Vec<T>(T(0)));
}

// Maximum and sum of a row whose keys have all been seen.
template <class T>
inline RowState<T> state_of(const SoftmaxRows<T>& rows, int64_t r, const Unit<T>& unit) {
  return {rows.reference[r] * unit.natural, sum_of(load(rows.sum + r * kLanes<T>))};
}

// By lanes. A function of its own: inlined, gcc keeps the maximum of eight-lane vectors in memory, and the loop waits for it.
template <class T>
__attribute__((noinline)) Vec<T> highest_of(const T* scores, Range seen) {
  Vec<T> even(-T(__builtin_inf())), odd = even;
  int64_t k = seen.begin;
  for (; k + kLanes<T> < seen.end; k += 2 * kLanes<T>) {
    even = maximum(load(scores + k), even);
    odd = maximum(load(scores + k + kLanes<T>), odd);
  }
  return maximum(k < seen.end ? maximum(load(scores + k), even) : even, odd);
}

// What was summed under the reference `old`, under another.
template <class T>
inline void follow_reference(T old, T now, const Unit<T>& unit, T* sums, int64_t size) {
  if (old == now || old == -T(__builtin_inf())) return;
  const Vec<T> factor = exp2(Vec<T>((old - now) * unit.log2));
  for (int64_t k = 0; k < size; k += kLanes<T>) store(sums + k, load(sums + k) * factor);
}

template <class T>
__attribute__((noinline)) void raise_reference(const SoftmaxRows<T>& rows, int64_t r, T highest, const Unit<T>& unit,
                                               T* output, int64_t width) {
  follow_reference(rows.reference[r], highest, unit, rows.sum + r * kLanes<T>, kLanes<T>);
  follow_reference(rows.reference[r], highest, unit, output, width);
  rows.reference[r] = highest;
  rows.limit[r] = highest + T(kSlack) / unit.log2;
}

// One row of a tile: scores to weights exp(score - reference), dropout applied but for its factor 1 / (1 - dropout_p); the sum, taken
// before dropout, and `output`, what was summed so far, follow the reference. kept: the scores become the weights as well.
template <class E, bool kDropout>
inline void softmax_row(const TileTerms& terms, const RowTerms<SumOf<E>>& row, Range keys, const Unit<SumOf<E>>& unit,
                        const SoftmaxRows<SumOf<E>>& rows, int64_t r, SumOf<E>* scores, E* weights,
                        [[maybe_unused]] bool kept, SumOf<E>* output, int64_t width) {
  using T = SumOf<E>;
  const Range seen = seen_vectors(terms, row, keys);
  const Vec<T> highest = highest_of(scores, seen);
  if (any_above(highest, rows.limit[r])) raise_reference(rows, r, maximum_of(highest), unit, output, width);
  const Vec<T> reference(shift(rows.reference[r])), log2(unit.log2), zero(T(0));
  Vec<T> sum = load(rows.sum + r * kLanes<T>);
  const auto write = [&](int64_t k, Vec<T> w) {
    Operand<E>::store_along(weights, k, w);
    if constexpr (kNumbers < E >> 1) {
      if (kept) store(scores + k, w);
    }
  };
  for (int64_t k = 0; k < seen.begin; k += kLanes<T>) write(k, zero);
  for (int64_t k = seen.begin; k < seen.end; k += kLanes<T>) {
    Vec<T> w = exp2((load(scores + k) - reference) * log2);
    sum = sum + w;
    if constexpr (kDropout) w = select(kept_lanes(row, k), w, w * zero);
    write(k, w);
  }
  for (int64_t k = seen.end; k < count(keys); k += kLanes<T>) write(k, zero);
  store(rows.sum + r * kLanes<T>, sum);
}

}  // namespace
}  // namespace scaledot
