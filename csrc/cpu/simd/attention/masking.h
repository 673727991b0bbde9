// Masks of a score tile: which keys its rows may attend to, what is added to scores, and what dropout drops.
// core/mask.h defines the masks; this file reads them in vectors.
#pragma once

#include "core/arena.h"
#include "cpu/simd/attention/score_mask.h"
#include "cpu/simd/dropout.h"

namespace scaledot {
namespace {

// How the rows of a tile say which keys are masked.
enum class MaskForm {
  none,
  range,   // RowTerms::live: each row attends to one range of keys; also for a tile that ends inside a vector
  states,  // RowTerms::state: a boolean mask
  blocks   // a tile that touches partial blocks of a block mask; its rows have a range if that says all, or states
};

// The steps that the scores of a tile need. Decided once a tile.
struct ScoreFlags {
  bool raw;  // dot products stay as they are: ScoreUnit
  bool softcap;
  bool program;   // a score program
  bool additive;  // ALiBi, relative_bias or a floating mask
  bool replaced;  // a boolean mask with a finite masked_score
  MaskForm mask;
  bool full;   // by position and blocks, every row attends to every key
  bool alike;  // the masks of all rows are the same
};

// ---------------------------------------------------------------------------------------------------- whole tiles
// Whether the block mask alone skips a tile, masks a part of it, or leaves it full.
inline TileKind block_tile_kind(const Problem& p, const QueryTile& tile, Range keys) {
  return block_tile_kind(p, tile.batch, heads_of(tile), tile.rows, keys);
}

// The keys of a key tile that at least one row of the query tile may attend to. The first is a multiple of
// kDropoutGroup, so that dropout words and panels are whole.
inline Range seen_keys(const Problem& p, const QueryTile& tile, Range keys) {
  Range range = key_range(p, tile.rows);
  if (has_blocks(p)) range = intersect(range, block_keys_of(p, tile.batch, heads_of(tile), tile.rows, keys));
  const int64_t begin = max<int64_t>(range.begin - keys.begin, 0) / kDropoutGroup * kDropoutGroup;
  return {keys.begin + begin, min(keys.end, range.end)};
}

// Whether positions, blocks, a score function or a boolean mask exclude the whole tile, so that nothing of it has to be
// computed.
inline bool excluded(const Problem& p, const QueryTile& tile, Range keys) {
  if (count(keys) <= 0 || tile_kind(p, tile.rows, keys) == TileKind::skip) return true;
  if (block_tile_kind(p, tile, keys) == TileKind::skip || masked_by_program(p, tile, keys)) return true;
  const TensorView& mask = p.attn_mask;
  if (!mask_use(p).boolean || !masked_is_excluded(p) || first_masked(p, keys) > 0) return false;
  const int64_t heads = mask.head_stride ? tile.heads : 1, rows = mask.row_stride ? count(tile.rows) : 1;
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < rows; ++i) {
      const uint8_t* allowed = element_ptr<const uint8_t>(p, mask, tile.batch, tile.first_head + h) +
                               (tile.rows.begin + i) * mask.row_stride + keys.begin * mask.col_stride;
      uint8_t any = 0;
      for (int64_t k = 0; k < count(keys); ++k) any |= allowed[k * mask.col_stride];
      if (any) return false;
    }
  return true;
}

// Whether relative_bias adds the same number to all scores of the tile: it is far from the diagonal, or there is none.
inline bool has_one_relative_bias(const Problem& p, const QueryTile& tile, Range keys) {
  if (!p.relative_bias.data) return true;
  const int64_t nearest = keys.begin - (tile.rows.end - 1 + p.position.diagonal);
  const int64_t farthest = keys.end - 1 - (tile.rows.begin + p.position.diagonal);
  const bool clamped = farthest <= p.relative_range.low || nearest >= p.relative_range.high;
  return clamped && (tile.heads == 1 || !p.relative_bias.head_stride);
}

// The distance from a tile to the one that is visited next.
struct Ahead {
  int64_t rows, keys;
};

constexpr Ahead kNextKeys = {0, kTileKeys};

// Prefetches one row of the next tile of a matrix of the scores' shape. Always inlined: gcc 12 finds that a function
// which only prefetches has no effect, and drops the calls.
SCALEDOT_INLINE void prefetch_row(const Problem& p, const TensorView& view, const QueryTile& tile, int64_t r,
                                  Range keys, Ahead ahead) {
  if (!view.data || !view.row_stride || view.col_stride != 1) return;
  const int64_t size = element_size(view.dtype), begin = keys.begin + ahead.keys;
  const char* from =
      static_cast<const char*>(view.data) +
      size * (offset(p, view, tile.batch, head_of(tile, r)) + (row_of(tile, r) + ahead.rows) * view.row_stride + begin);
  for (int64_t line = 0; line < count(keys) * size; line += kCacheLine) __builtin_prefetch(from + line);
}

// Prefetches the rows of this tile.
SCALEDOT_INLINE void prefetch_rows(const Problem& p, const TensorView& view, const QueryTile& tile, Range keys) {
  for (int64_t r = 0; r < tile_rows(tile); ++r) prefetch_row(p, view, tile, r, keys, {0, 0});
}

// The mask of the first tile: there is no earlier tile to hide the latency behind.
SCALEDOT_INLINE void prefetch_mask(const Problem& p, const QueryTile& tile, Range keys) {
  if (has_mask(p, keys)) prefetch_rows(p, p.attn_mask, tile, keys);
}

// ---------------------------------------------------------------------------------------------------- one row
// A row's mask terms for the keys of a tile. The arrays have kTileKeys elements.
template <class Sum>
struct RowTerms {
  Sum scale;             // of dot products: with that of quantised keys
  MaskForm mask;         // range instead of states where that says all
  Sum* additive_memory;  // kTileRows more than kTileKeys: load_alibi
  uint8_t* state_memory;
  uint32_t* words_memory;         // dropout: whole groups of columns
  const uint32_t* words;          // in words_memory, from the tile's first key on
  const Sum* additive;            // in additive_memory, or the mask or relative_bias itself; -inf masks the key
  int64_t alibi_head;             // whose biases load_alibi has written; -1: none
  const uint8_t* state;           // in state_memory, or the mask itself
  Range live;                     // MaskForm::range: the keys that the row attends to, counted from the tile's first
  uint32_t threshold;             // the keep mask has a weight if its word is at least this
  PhiloxKeys philox_keys;         // of the tile's seed
  ScoreRegisters<Sum> registers;  // of a score program
};

template <class Sum>
RowTerms<Sum> lay_out_row(const Problem& p, Arena& arena) {
  RowTerms<Sum> row = {};
  row.additive_memory = take<Sum>(arena, kTileKeys + kTileRows);
  row.state_memory = take<uint8_t>(arena, kTileKeys);
  row.words_memory = take<uint32_t>(arena, dropout_room(kTileKeys + kDropoutGroup));
  row.registers = lay_out_registers<Sum>(p, arena);
  return row;
}

// Lanes whose weights dropout keeps.
template <class Sum>
SCALEDOT_INLINE Mask<Sum> dropout_mask(const RowTerms<Sum>& row, int64_t k) {
  return words_at_least<Sum>(row.words + k, row.threshold);
}

// The row of attn_mask from the tile's first key on, if it has this dtype and contiguous columns. Otherwise nullptr.
template <class Element>
inline const Element* mask_row(const Problem& p, const QueryTile& tile, int64_t r, Range keys, DType dtype) {
  const TensorView& mask = p.attn_mask;
  if (mask.dtype != dtype || mask.col_stride != 1 || first_masked(p, keys) > 0) return nullptr;
  return element_ptr<const Element>(p, mask, tile.batch, head_of(tile, r)) + row_of(tile, r) * mask.row_stride +
         keys.begin;
}
// The row of relative_bias itself, if no distance of a whole vector is clamped. Otherwise nullptr.
template <class Sum>
inline const Sum* relative_in_place(const Problem& p, const QueryTile& tile, int64_t r, Range keys) {
  const int64_t distance = keys.begin - (row_of(tile, r) + p.position.diagonal);
  const int64_t farthest = distance + round_up(count(keys), int64_t(kLanes<Sum>)) - 1;
  if (distance < p.relative_range.low || farthest > p.relative_range.high) return nullptr;
  return element_ptr<const Sum>(p, p.relative_bias, tile.batch, head_of(tile, r)) + distance - p.relative_range.low;
}
// All that is added to the scores of a row, if it can be read in place.
template <class Sum>
inline const Sum* additive_in_place(const Problem& p, const QueryTile& tile, int64_t r, Range keys) {
  const bool adds = adds_mask(p) && has_mask(p, keys);
  if (p.alibi_slopes.data || (adds && p.relative_bias.data)) return nullptr;
  if (!adds) return relative_in_place<Sum>(p, tile, r, keys);
  if (count(keys) % kLanes<Sum> != 0) return nullptr;
  return mask_row<Sum>(p, tile, r, keys, sizeof(Sum) == sizeof(double) ? DType::float64 : DType::float32);
}
// Widens a row of attn_mask into additive_memory. False if something else is added too, or its columns have gaps.
inline bool widen_mask_row(const Problem& p, const QueryTile& tile, int64_t r, Range keys, const RowTerms<float>& row) {
  if (p.alibi_slopes.data || p.relative_bias.data) return false;
  const auto widen = [&](const auto* from) {
    Finite<float> unused;
    if (from) load_row(from, 1, count(keys), row.additive_memory, unused);
    return from != nullptr;
  };
  return widen(mask_row<float>(p, tile, r, keys, DType::float32)) ||
         widen(mask_row<BFloat16>(p, tile, r, keys, DType::bfloat16)) ||
         widen(mask_row<Float16>(p, tile, r, keys, DType::float16));
}
// ALiBi alone. Its biases depend on the distance, so those of a head's rows lie in one array, each row's one element
// before those of the row above. Written for the first of the rows, from its last row's biases on.
template <class Sum>
inline bool load_alibi(const Problem& p, const QueryTile& tile, int64_t r, Range keys, RowTerms<Sum>& row) {
  if (!p.alibi_slopes.data || p.relative_bias.data || (adds_mask(p) && has_mask(p, keys))) return false;
  const int64_t head = head_of(tile, r), last = tile.rows.end - 1, after = last - row_of(tile, r);
  if (row.alibi_head != head) {
    const RowMask<Sum> mask = row_mask<Sum>(p, tile.batch, head, last);
    const int64_t size = after + round_up(count(keys), int64_t(kLanes<Sum>));
    for (int64_t n = 0; n < size; ++n) row.additive_memory[n] = alibi_bias(mask, keys.begin + n);
    row.alibi_head = head;
  }
  row.additive = row.additive_memory + after;
  return true;
}
// A row of a boolean mask as states: False is kMasked, which is 0; True is kLive or another nonzero number. The row
// itself, or a copy with zeros up to a whole vector. nullptr if the states also depend on something else.
template <class Sum>
inline const uint8_t* state_row(const Problem& p, const QueryTile& tile, int64_t r, Range keys, const ScoreFlags& flags,
                                const RowTerms<Sum>& row) {
  if (!flags.full || flags.replaced) return nullptr;
  const uint8_t* const from = mask_row<uint8_t>(p, tile, r, keys, DType::boolean);
  if (!from || count(keys) % kLanes<Sum> == 0) return from;
  for (int64_t k = 0; k < count(keys); k += kVectorBytes) {
    const auto bytes = first_elements<Native<uint8_t>>(from + k, min<int64_t>(count(keys) - k, kVectorBytes));
    __builtin_memcpy(row.state_memory + k, &bytes, kVectorBytes);
  }
  return row.state_memory;
}

template <class Sum>
inline void load_dropout_words(const Problem& p, const QueryTile& tile, int64_t r, Range keys, RowTerms<Sum>& row,
                               bool again) {
  const DropoutRow stream = dropout_row(p, tile.batch, head_of(tile, r), row_of(tile, r));
  if (!again) row.philox_keys.set(stream);
  const PhiloxRow philox_row(stream, row.philox_keys);
  row.threshold = stream.threshold;
  // Groups start at the tile's first key, or before it if the call is part of a larger attention.
  const int64_t first = stream.first_column + keys.begin, before = first % kDropoutGroup;
  row.words = row.words_memory + before;
  dropout_words(philox_row, (first - before) / kDropoutGroup, before + count(keys), row.words_memory);
}

// The keys that the block mask shows to row r of the tile: the range from the first to the last, and whether it shows
// all between.
struct ShownKeys {
  Range keys;
  bool all;
};
inline ShownKeys shown_keys(const Problem& p, const QueryTile& tile, int64_t r, Range keys) {
  const int64_t start = offset(p, p.blocks, tile.batch, head_of(tile, r)), i = row_of(tile, r);
  Range range = {keys.end, keys.begin};
  int64_t shown = 0;
  for (int64_t begin = keys.begin; begin < keys.end; begin += 64) {
    const uint64_t bits = row_bits(p, start, i, {begin, min<int64_t>(begin + 64, keys.end)});
    if (bits == 0) continue;
    range.begin = min<int64_t>(range.begin, begin + __builtin_ctzll(bits));
    range.end = begin + 64 - __builtin_clzll(bits);
    shown += __builtin_popcountll(bits);
  }
  return {range, shown == max<int64_t>(count(range), 0)};
}

// The keys that row r attends to by position, counted from the tile's first; `range`: those of the row.
inline Range live_in_tile(Range range, Range keys) {
  // The row's keys may all lie before the tile, or after it.
  const int64_t begin = clamped(range.begin, keys.begin, keys.end);
  return {begin - keys.begin, clamped(range.end, begin, keys.end) - keys.begin};
}

// Fills `row` for row r of the tile. `again`: it already holds the terms of another row of the same tile.
template <class Sum>
inline void load_terms(const Problem& p, const QueryTile& tile, int64_t r, Range keys, const ScoreFlags& flags,
                       Ahead ahead, RowTerms<Sum>& row, bool again = false) {
  if (has_mask(p, keys.end - 1 + ahead.keys)) prefetch_row(p, p.attn_mask, tile, r, keys, ahead);
  if (p.dropout_p > 0) load_dropout_words(p, tile, r, keys, row, again);
  row.scale = Sum(p.scale * cache_scale(p, p.k_scale, tile.batch, tile.kv_head));
  if (flags.program) {
    const ScoreInterpreter<Sum> program(p, row.registers);
    const bool same_head = again && row.registers.head == head_of(tile, r);
    row.registers.row = r;
    row.registers.head = head_of(tile, r);
    row.registers.diagonal = program.diagonal_of(tile, r);
    if (!again) program.begin_tile(tile, keys);
    if (!same_head) program.begin_head(tile, keys);
  }
  if (again && flags.alike) return;
  if (!again) row.alibi_head = -1;
  row.mask = flags.mask;
  if (flags.mask == MaskForm::range || flags.mask == MaskForm::blocks) {
    Range live = row_keys(p, row_of(tile, r));
    if (flags.mask == MaskForm::blocks) {
      const ShownKeys shown = shown_keys(p, tile, r, keys);
      live = intersect(live, shown.keys);
      row.mask = shown.all ? MaskForm::range : MaskForm::states;
    }
    row.live = live_in_tile(live, keys);
  }
  const bool states = row.mask == MaskForm::states;
  if (!states && !flags.additive) return;
  row.additive = flags.additive ? additive_in_place<Sum>(p, tile, r, keys) : nullptr;
  row.state = states ? state_row(p, tile, r, keys, flags, row) : nullptr;
  if (flags.additive && !states && load_alibi(p, tile, r, keys, row)) return;
  if constexpr (sizeof(Sum) == sizeof(float)) {
    if (!states && !row.additive && widen_mask_row(p, tile, r, keys, row)) row.additive = row.additive_memory;
  }
  if ((row.additive || !flags.additive) && (row.state || !states)) return;
  row.additive = row.additive_memory;
  row.alibi_head = -1;  // its biases are overwritten
  row.state = row.state_memory;
  row_terms<Sum>(p, tile.batch, head_of(tile, r), row_of(tile, r), keys, row.additive_memory,
                 states ? row.state_memory : nullptr);
  for (int64_t k = count(keys); k % kLanes<Sum> != 0; ++k) {
    row.state_memory[k] = kMasked;
    row.additive_memory[k] = Sum(0);
  }
}

// The row terms of positions alone, without boolean and additive masks.
template <class Sum>
inline void load_position_terms(const Problem& p, const QueryTile& tile, int64_t r, Range keys, RowTerms<Sum>& row,
                                bool again) {
  if (p.dropout_p > 0) load_dropout_words(p, tile, r, keys, row, again);
  const bool all = tile_kind(p, tile.rows, keys) == TileKind::full;
  row.mask = all ? MaskForm::none : MaskForm::range;
  if (!all) row.live = live_in_tile(row_keys(p, row_of(tile, r)), keys);
}

// The part of the tile, in whole vectors, that has any key the row attends to.
template <class Sum>
inline Range seen_vectors(const RowTerms<Sum>& row, Range keys) {
  const int64_t lanes = kLanes<Sum>, all = round_up(count(keys), lanes);
  if (row.mask != MaskForm::range) return {0, all};
  if (row.live.end <= row.live.begin) return {0, 0};
  return {row.live.begin / lanes * lanes, round_up(row.live.end, lanes)};
}

// Whether key k of the tile is masked or past the last key.
template <class Sum>
inline bool is_masked(const ScoreFlags& flags, const RowTerms<Sum>& row, Range keys, int64_t k) {
  if (k >= count(keys)) return true;
  if (row.mask == MaskForm::range && (k < row.live.begin || k >= row.live.end)) return true;
  if (row.mask == MaskForm::states && row.state[k] != kLive) return row.state[k] == kMasked;
  if (flags.program && *row.registers.hides && row.registers.result[k] == -Sum(__builtin_inf())) return true;
  return flags.additive && row.additive[k] == -Sum(__builtin_inf());
}

// A replaced score has a weight, which is multiplied with value. It does not depend on query and key.
enum class OnReplaced { keep, mark };

// Puts kSkip at the masked positions of a row of weights or gradients, and turns a live -0 into 0. Needed only if they
// are multiplied with NaN or inf. Element k of the row is first[k * stride].
template <class Sum, class Element>
SCALEDOT_RARE void mark_masked(const ScoreFlags& flags, const RowTerms<Sum>& row, Range keys, Element* first,
                               int64_t stride, OnReplaced on_replaced = OnReplaced::keep) {
  const int64_t end = padded<Sum>(count(keys));  // operands, and their padding, reach past the last key
  for (int64_t k = 0; k < end; ++k) {
    const bool replaced = k < count(keys) && row.mask == MaskForm::states && row.state[k] == kReplaced;
    const bool masked = is_masked(flags, row, keys, k) || (replaced && on_replaced == OnReplaced::mark);
    const Sum x = Sum(widen(first[k * stride]));
    narrow(masked ? kSkip<Sum> : x == Sum(0) ? Sum(0) : x, first[k * stride]);
  }
}

// Puts 0 at the masked positions of a row.
template <class Sum>
SCALEDOT_RARE void clear_masked(const ScoreFlags& flags, const RowTerms<Sum>& row, Range keys, Sum* first) {
  mark_masked(flags, row, keys, first, 1);
  for (int64_t k = 0; k < count(keys); ++k) first[k] = is_skip(first[k]) ? Sum(0) : first[k];
}

}  // namespace
}  // namespace scaledot
