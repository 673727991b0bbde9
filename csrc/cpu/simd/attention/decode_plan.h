// The decode kernel's tasks and its scratch memory, and what its backward shares with them.
#pragma once

#include "core/arena.h"
#include "cpu/simd/attention/partial_sums.h"
#include "cpu/simd/attention/row_lanes.h"

namespace scaledot {
namespace {

// The order in which keys are read: as kDecodeStreams contiguous parts, one key of each at every step.
template <class Sum>
struct DecodeStreams {
  // Steps that are taken together: as many as a tile of the tile unit has keys, or kGroupSteps.
  static constexpr int64_t kAtOnce = kHasTileUnit ? kUnitSide : kGroupSteps<Sum>;
  int64_t steps;  // keys in a part: a multiple of kAtOnce, so that the last part may have fewer

  explicit DecodeStreams(int64_t keys) : steps(round_up(ceil_div(keys, int64_t(kDecodeStreams)), kAtOnce)) {}
  int64_t places() const { return kDecodeStreams * steps; }                          // at least the number of keys
  int64_t key(int64_t step, int64_t stream) const { return stream * steps + step; }  // may be past the last key
};

// How the rows of a KV group meet keys and values.
struct DecodeRows {
  int64_t rows;
  int64_t whole_rows;  // `rows`, rounded up to whole row blocks where that costs less than single rows
  int64_t turns;       // KV heads that take turns with a split; divides kv_heads
};

// Scratch memory for one KV head. `rows`: DecodeRows::whole_rows.
template <class Sum>
struct DecodeScratch {
  Sum* query;    // (rows, head_dim padded) in the order of DecodeProducts, or (head_dim padded, row lanes)
  Sum* scores;   // (rows, kDecodeSplit)
  Sum* sums;     // (rows, larger width padded): the query as it lies, then P V of neighbouring key tiles
  Sum* widened;  // (kGroupKeys, head_dim padded): keys that are read several times, if they are narrower than a sum
  RowTerms<Sum> terms;
};

// A KV head that takes its turn with a split.
template <class Sum>
struct DecodeHead {
  QueryTile tile;  // all its rows
  DecodeScratch<Sum> scratch;
  int64_t first_row;  // in `softmax` of the plan
  Sum* output;        // of the split
};

template <class Sum>
struct DecodePlan : PartialSums<Sum> {
  DecodeRows at_once;
  char* scratch;  // of worker 0
  int64_t scratch_bytes;
};

// The query rows of a KV group that the decode kernel takes, at most. With more, packing keys and values is faster: it
// takes a time for each column, reading them in place a time for each row. (Its time / that of the tiled kernel, Intel
// Xeon with AMX, 4,096 keys. Forward, float32: 0.67 to 0.80 at 24 and 32 rows with keys of 512 bytes or more, 0.45 to
// 1.0 at 9 to 16 rows with head_dim from 64 on, 1.06 to 1.13 with less. float16: 0.95 at 9 and 16 rows, 1.12 at 32 rows
// with head_dim 256. bfloat16 without AMX: 0.77 to 0.87, with it 0.66 to 0.90 at 8 to 32 rows. Backward, all three:
// 0.62 to 1.0 at 9 to 32 rows. With columns that do not fill vectors, packing takes longer: over 300 and 1,000
// keys, float32 and float16 with head_dim 24 and 40 have 0.66 to 0.95 at 9 to 16 rows, with 32 and 48 0.89 to 1.22.)
inline int64_t most_decode_rows(const Problem& p, Pass pass) {
  if (kHasTileUnit || pass == Pass::backward) return kDecodeRows;
  if (element_size(p.key.dtype) > 2 && p.head_dim * element_size(p.key.dtype) >= kLongKeyBytes) return kDecodeRows;
  const bool long_keys = p.head_dim >= kLongKeyColumns || p.head_dim % kLanes<float> != 0;
  return long_keys ? kDecodeRows / 2 : kDecodeRows / 4;
}

// Whether the heads of a key are neighbours in memory, so that the rows of a head are not.
inline bool heads_are_together(const Problem& p) {
  return p.key.head_stride < p.key.row_stride && p.value.head_stride < p.value.row_stride;
}

// Heads that see different tiles take no turns.
inline int64_t heads_in_turn(const Problem& p, int64_t splits, int workers) {
  const bool own_tiles = (p.attn_mask.data && p.attn_mask.head_stride) || (has_blocks(p) && p.blocks.head_stride);
  const int64_t bytes = p.key_length * p.key.row_stride * element_size(p.key.dtype);
  if (own_tiles || !heads_are_together(p) || bytes < kPrefetchFrom) return 1;
  const int64_t tasks = p.batch * p.kv_heads * splits;
  int64_t turns = max(min(p.kv_heads, kTurnHeads), int64_t(1));
  while (turns > 1 && (p.kv_heads % turns || tasks < turns * workers * kTasksPerWorker)) --turns;
  return turns;
}

// A block of four rows takes less time than two single rows: each key is loaded and widened once. A tile of the tile
// unit has kUnitSide rows.
template <class Sum>
constexpr int kRowBlock = kHasTileUnit ? kUnitSide : min(kLanes<Sum>, kDecodeRowBlock);
template <class Sum>
int64_t whole_decode_rows(int64_t rows) {
  return rows % kRowBlock<Sum> > 1 || kHasTileUnit ? round_up(rows, int64_t(kRowBlock<Sum>)) : rows;
}

// Elements of all rows of a KV group in the order of DecodeProducts.
template <class Sum>
int64_t ordered_size(const DecodeRows& rows, int64_t cols) {
  return max(rows.whole_rows, row_lanes<Sum>(rows.rows)) * padded<Sum>(cols);
}

// Elements of a group of keys or values that are widened before they are multiplied with many rows. The tile unit's
// are copied as bfloat16 where they do not lie as tiles.
template <class Sum>
int64_t widened_size(const Problem& p, const DecodeRows& rows, int64_t cols) {
  if (kHasTileUnit) return kDecodeStreams * kUnitSide * padded<Sum>(cols) / 2;
  const bool narrow = element_size(p.key.dtype) < int64_t(sizeof(Sum));
  return narrow && row_lanes<Sum>(rows.rows) > 0 ? kGroupKeys<Sum> * padded<Sum>(cols) : 0;
}

template <class Sum>
DecodeScratch<Sum> lay_out_decode(const Problem& p, const DecodeRows& rows, Arena& arena) {
  return {take<Sum>(arena, ordered_size<Sum>(rows, p.head_dim)), take<Sum>(arena, rows.whole_rows * kDecodeSplit),
          take<Sum>(arena, rows.whole_rows * padded<Sum>(max(p.head_dim, p.value_dim))),
          take<Sum>(arena, widened_size<Sum>(p, rows, p.head_dim)), lay_out_row<Sum>(p, arena)};
}

template <class Sum>
DecodePlan<Sum> plan_decode(const Problem& p, int workers, Arena& arena) {
  const int64_t splits = max<int64_t>(ceil_div(p.key_length, kDecodeSplit), 1);
  DecodePlan<Sum> plan = {lay_out_partial_sums<Sum>(p, p.batch * p.kv_heads, splits, arena), {}, nullptr, 0};
  plan.at_once = {plan.rows, whole_decode_rows<Sum>(plan.rows), heads_in_turn(p, splits, workers)};
  plan.scratch = take<char>(arena, 0);
  const int64_t start = arena.used;
  for (int64_t head = 0; head < plan.at_once.turns; ++head) lay_out_decode<Sum>(p, plan.at_once, arena);
  plan.scratch_bytes = arena.used - start;
  arena.used = start + workers * plan.scratch_bytes;
  return plan;
}

// The rows of a tile, widened, and zeros up to whole row blocks. Returns whether all are finite.
template <class Sum>
bool load_decode_rows(const Problem& p, const TensorView& view, const QueryTile& tile, int64_t cols,
                      const DecodeRows& rows, Sum* to) {
  Finite<Sum> finite;
  const int64_t width = padded<Sum>(cols);
  for (int64_t r = 0; r < rows.rows; ++r)
    with_storage_of<Sum>(p.dtype, [&]<class Storage>(Type<Storage>) {
      const RowBlock<Storage> row = block<Storage>(p, view, tile.batch, head_of(tile, r), row_of(tile, r));
      load_row(row.data, row.col_stride, cols, to + r * width, finite);
    });
  clear_row(to + rows.rows * width, (rows.whole_rows - rows.rows) * width);
  return finite.all();
}

inline Range decode_split(const Problem& p, int64_t split) {
  return {split * kDecodeSplit, min((split + 1) * kDecodeSplit, p.key_length)};
}

// Calls body(span) for the keys of a split that a tile attends to: neighbouring key tiles that are not excluded are
// read together.
template <class Body>
void for_each_span(const Problem& p, const QueryTile& tile, int64_t split, const Body& body) {
  Range span = {0, 0};
  for_each_tile(p, intersect(key_range(p, tile.rows), decode_split(p, split)), [&](Range keys) {
    if (excluded(p, tile, keys)) return;
    if (span.end != keys.begin && count(span) > 0) body(span);
    span = {span.end == keys.begin ? span.begin : keys.begin, keys.end};
  });
  if (count(span) > 0) body(span);
}

}  // namespace
}  // namespace scaledot
