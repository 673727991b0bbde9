// Packed sequences in the backward. A tile of rows or keys has one sequence, whose problem a block makes in shared
// memory.
//
// Products read a sequence's last tiles whole, with rows of the next sequence. Their weights and score gradients are 0,
// unless those rows have NaN or inf: then a gradient has NaN, and is computed once more (backward_finish.cuh).
#pragma once

#include "cuda/sm90/backward_plan.cuh"
#include "cuda/sm90/packed_tiles.cuh"

namespace scaledot {
namespace {

// The tiles of a packed sequence: those of rows of one query head, and those of keys. `first`: among the tiles of all
// sequences.
struct Sm90SequenceTiles {
  int sequence, first_row_tile, row_tiles, first_key_tile, key_tiles;
};
SCALEDOT_DEVICE Sm90SequenceTiles tiles_of_sequence(const Sm90BackwardPlan& plan, int b) {
  const int row = global_load(plan.row_starts + b), key = global_load(plan.key_starts + b);
  return {b, row, global_load(plan.row_starts + b + 1) - row, key, global_load(plan.key_starts + b + 1) - key};
}

// plan.row_starts and plan.key_starts. Each block of the first kernel stores all of them, the same numbers, and reads
// only what it has stored itself. So no other kernel has to come before.
template <class C>
SCALEDOT_DEVICE void store_all_tile_starts(const Problem& p, const Sm90BackwardPlan& plan) {
  store_tile_starts(
      p.batch, [&](int64_t b) { return ceil_div(query_rows(p, b).count, C::kRows); }, int(plan.row_tiles),
      plan.row_starts);
  barrier();
  store_tile_starts(
      p.batch, [&](int64_t b) { return ceil_div(key_rows(p, b).count, C::kKeys); }, int(plan.key_tiles),
      plan.key_starts);
  barrier();
}

// The rows of a sequence that its tiles have: all of them, unless cu_seq is wrong.
SCALEDOT_DEVICE RowSpan rows_in_tiles(RowSpan rows, int tiles, int size) {
  return {rows.first, min<int64_t>(rows.count, int64_t(tiles) * size)};
}

// Makes the problem of a sequence of `p`, a copy of `packed` or another of its sequences: what the backward for sm_90
// needs of it.
template <class C>
SCALEDOT_DEVICE void narrow_to_tiles(const Problem& packed, const Sm90SequenceTiles& tiles, Problem& p) {
  const RowSpan query = rows_in_tiles(query_rows(packed, tiles.sequence), tiles.row_tiles, C::kRows);
  const RowSpan key = rows_in_tiles(key_rows(packed, tiles.sequence), tiles.key_tiles, C::kKeys);
  narrow_lengths(packed, query, key, p);
  skip_rows(p.grad_key, packed.grad_key, key.first);
  skip_rows(p.grad_value, packed.grad_value, key.first);
}

constexpr int kRowThreads = 256;  // of the kernels that take tiles of rows
static_assert(kRowThreads == kCountThreads);

// A tile of rows of one query head.
struct Sm90RowTile {
  int64_t batch, head;
  int64_t tile;                // of the head, in its sequence
  RowSpan rows;                // of the sequence, or of the batch entry: all from 0 on
  Sm90SequenceTiles sequence;  // of packed sequences
};

// How many there are of all heads.
template <bool kPacked>
SCALEDOT_DEVICE int64_t row_tile_count(const Problem& p, const Sm90BackwardPlan& plan) {
  if constexpr (kPacked)
    return p.heads * global_load(plan.row_starts + p.batch);
  else
    return p.batch * p.heads * plan.row_tiles;
}
// Row tile `number`, of `size` rows.
template <bool kPacked>
SCALEDOT_DEVICE Sm90RowTile row_tile(const Problem& p, const Sm90BackwardPlan& plan, int64_t number, int size) {
  if constexpr (kPacked) {
    const int b = sequence_of_tile(plan.row_starts, p.batch, int(number / p.heads));
    const Sm90SequenceTiles tiles = tiles_of_sequence(plan, b);
    const int64_t within = number - p.heads * tiles.first_row_tile;
    return {0, within / tiles.row_tiles, within % tiles.row_tiles,
            rows_in_tiles(query_rows(p, b), tiles.row_tiles, size), tiles};
  } else {
    const int64_t batch_head = number / plan.row_tiles;
    return {batch_head / p.heads, batch_head % p.heads, number % plan.row_tiles, {0, p.query_length}, {}};
  }
}

}  // namespace
}  // namespace scaledot
