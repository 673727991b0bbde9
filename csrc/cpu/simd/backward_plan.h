// What the backward (backward.h) works in: its tasks, and its scratch memory.
#pragma once

#include "cpu/simd/forward.h"
#include "cpu/simd/mask_gradient.h"

namespace scaledot {
namespace {

constexpr int64_t kWantedTasks = 16;                // cut planes into runs until there are this many tasks ...
constexpr int64_t kRunsBudget = int64_t(48) << 20;  // ... as far as what each of them keeps fits in this many bytes
constexpr int64_t kRowTilesOfRun = 10;              // at least: each run has its keys packed anew
constexpr int64_t kRowTilesOfPart = 16;             // of dK and dV: so many are summed apart

// What belongs to one group of kNumbers rows: as many as the columns of an operand come from.
template <class E>
struct GroupTerms {
  using T = SumOf<E>;
  RowTerms<T> row[kNumbers<E>];
  T* slopes;        // kTileKeys a row, all three
  T* grad_weights;  // dW
  T* grad_scores;   // dS
};

template <class E>
struct BackwardScratch {
  using T = SumOf<E>;
  NumberOf<E>* numbers;  // a square of rows on their way to operands
  // Of the key tile.
  Panels<E> key_columns;    // K^T
  Panels<E> value_columns;  // V^T
  Panels<E> keys;           // K
  T* grad_key;              // (kTileKeys, head_dim padded)
  T* grad_value;            // (kTileKeys, value_dim padded)
  T* grad_key_part;         // the same two of a few row tiles; nullptr: there are no more
  T* grad_value_part;
  // Of the row tile.
  E* query;        // rows
  E* grad_output;  // rows
  Panels<E> queries;
  Panels<E> grad_outputs;
  T* grad_query;  // (kTileRows, head_dim padded), where dQ is computed apart; the same of one slab
  T* grad_query_part;
  SplitLse<T>* shift;
  T* delta;
  bool* whole;  // whether all keys of the row are in one tile: its sum and delta are taken from the tile of scores
  bool finite;  // all that its scores' gradients are made of
  // Of the tile of scores. Where operands are plain numbers, these are only two arrays.
  T* scores;        // (kTileRows, kRowStride<T>): S
  T* grads;         // the same: dP
  E* weights;       // Pd, to be read as columns
  E* grad_columns;  // dX, the same
  E* grad_rows;     // dX, to be read as rows
  GroupTerms<E> group;
};

template <class E>
Panels<E> take_panels(Arena& arena, int64_t steps, int64_t cols) {
  return {take<E>(arena, round_up(cols, int64_t(kPanel<E>)) * steps), steps * kPanel<E>, true};
}

template <class E>
BackwardScratch<E> lay_out_backward(const Problem& p, Arena& arena) {
  using T = SumOf<E>;
  BackwardScratch<E> s;
  s.numbers = take<NumberOf<E>>(arena, kLanes<T> * padded<T>(max(p.head_dim, p.value_dim)));
  s.key_columns = take_panels<E>(arena, steps_of<E>(p.head_dim), kTileKeys);
  s.value_columns = take_panels<E>(arena, steps_of<E>(p.value_dim), kTileKeys);
  s.keys = take_panels<E>(arena, steps_of<E>(kTileKeys), p.head_dim);
  s.grad_key = take<T>(arena, kTileKeys * padded<T>(p.head_dim));
  s.grad_value = take<T>(arena, kTileKeys * padded<T>(p.value_dim));
  const bool parts = tiles_per_plane(tile_problem(p, Cut::even)) > kRowTilesOfPart;
  s.grad_key_part = parts ? take<T>(arena, kTileKeys * padded<T>(p.head_dim)) : nullptr;
  s.grad_value_part = parts ? take<T>(arena, kTileKeys * padded<T>(p.value_dim)) : nullptr;
  s.query = take_rows<E>(arena, p.head_dim);
  s.grad_output = take_rows<E>(arena, p.value_dim);
  s.queries = take_panels<E>(arena, steps_of<E>(kTileRows), p.head_dim);
  s.grad_outputs = take_panels<E>(arena, steps_of<E>(kTileRows), p.value_dim);
  s.grad_query = take<T>(arena, kTileRows * padded<T>(p.head_dim));
  s.grad_query_part = take<T>(arena, kTileRows * padded<T>(p.head_dim));
  s.shift = take<SplitLse<T>>(arena, kTileRows);
  s.delta = take<T>(arena, kTileRows);
  s.whole = take<bool>(arena, kTileRows);
  s.scores = take<T>(arena, kTileRows * kRowStride<T>);
  s.grads = take<T>(arena, kTileRows * kRowStride<T>);
  if constexpr (kNumbers<E> == 1) {
    static_assert(kRowStride<E> == kColumnStride<E>);
    s.weights = s.scores;
    s.grad_columns = s.grad_rows = s.grads;
  } else {
    s.weights = take<E>(arena, steps_of<E>(kTileRows) * kColumnStride<E>);
    s.grad_columns = take<E>(arena, steps_of<E>(kTileRows) * kColumnStride<E>);
    s.grad_rows = take_rows<E>(arena, kTileKeys);
  }
  for (RowTerms<T>& row : s.group.row) row = lay_out_row<T>(arena);
  s.group.slopes = take<T>(arena, kTileKeys * kNumbers<E>);
  s.group.grad_weights = take<T>(arena, kTileKeys * kNumbers<E>);
  s.group.grad_scores = take<T>(arena, kTileKeys * kNumbers<E>);
  return s;
}

// What the planes of a class are cut into, so that there are enough tasks.
enum class RunsOf {
  keys,  // neighbouring key tiles; each adds up a slab of dQ, if there are several
  rows   // row tiles, each of them `runs` after the one before; each run adds up dK and dV of its own
};

template <class E>
struct BackwardPlan {
  using T = SumOf<E>;
  int64_t key_tiles;
  int64_t row_tiles;  // of a plane
  int64_t classes;  // sets of planes that one task after the other visits (see MaskGradient); usually each plane is one
  RunsOf of;
  int64_t runs;
  int64_t tile;        // numbers in dQ of a row tile, rows padded
  bool apart;          // dQ is computed apart from dK and dV
  bool whole_rows;     // there is one tile of keys: every row is whole, and nothing is prepared
  T* delta;            // (batch, heads, query_length); none of whole rows
  SplitLse<T>* shift;  // the same
  T* grad_query;  // (plane, run, row tile), or a run's row tiles for each worker; none if apart or there is but one key tile
  T* grad_key;    // (plane, run, key_length, head_dim padded) of runs of rows
  T* grad_value;  // (plane, run, key_length, value_dim padded) of the same
  char* scratch;  // of worker 0
  int64_t scratch_bytes;

  bool sums_grad_query() const { return of == RunsOf::keys && runs > 1; }  // over the runs
  bool sums_grad_key() const { return of == RunsOf::rows; }                // and dV
  Range keys_of(int64_t run) const {
    return of == RunsOf::keys ? Range{key_tiles * run / runs, key_tiles * (run + 1) / runs} : Range{0, key_tiles};
  }
  // Row tiles of a run, and where in the plane the n-th of them is. Neighbours differ in rows or heads: of each causal run, some are long.
  int64_t rows_of(int64_t run) const { return of == RunsOf::rows ? ceil_div(row_tiles - run, runs) : row_tiles; }
  int64_t row_tile_of(int64_t run, int64_t n) const { return of == RunsOf::rows ? run + n * runs : n; }
};

// Runs of `tiles`, of which each keeps so many bytes: until there are kWantedTasks, as far as kRunsBudget reaches.
inline int64_t affordable_runs(int64_t classes, int64_t tiles, int64_t bytes) {
  const int64_t wanted = min(ceil_div(kWantedTasks, max<int64_t>(classes, 1)), tiles);
  return max<int64_t>(min(wanted, kRunsBudget / max<int64_t>(bytes, 1)), 1);
}

template <class E>
BackwardPlan<E> plan_backward(const Problem& p, int workers, Arena& arena) {
  using T = SumOf<E>;
  const int64_t planes = p.batch * p.kv_heads;
  const int64_t key_width = padded<T>(p.head_dim), value_width = padded<T>(p.value_dim);
  const Tiling tiling = tile_problem(p, Cut::even);
  BackwardPlan<E> plan = {};
  plan.key_tiles = ceil_div(p.key_length, kTileKeys);
  plan.row_tiles = tiles_per_plane(tiling);
  plan.classes = gradient_classes(p);
  plan.tile = tiling.rows * tiling.heads * key_width;
  // A run of keys keeps dQ of all heads that share them; a run of rows dK and dV, which may be less.
  const int64_t rows = plan.row_tiles * plan.tile, keys = p.key_length * (key_width + value_width);
  const int64_t key_runs = affordable_runs(plan.classes, plan.key_tiles, planes * rows * int64_t(sizeof(T)));
  const int64_t row_runs =
      affordable_runs(plan.classes, plan.row_tiles / kRowTilesOfRun, planes * keys * int64_t(sizeof(T)));
  const bool of_rows = planes_are_classes(p) && keys < rows && row_runs > 1;
  plan.of = of_rows ? RunsOf::rows : RunsOf::keys;
  plan.runs = of_rows ? row_runs : key_runs;
  plan.apart = plan.classes * plan.runs < workers && count(plan.keys_of(plan.runs - 1)) > 1 && !p.grad_mask.data;
  plan.whole_rows = plan.key_tiles == 1 && !p.part.given;
  const int64_t prepared = plan.whole_rows ? 0 : p.batch * p.heads * p.query_length;
  plan.delta = take<T>(arena, prepared);
  plan.shift = take<SplitLse<T>>(arena, prepared);
  const int64_t slabs = plan.sums_grad_query() ? planes * plan.runs : workers;
  plan.grad_query = take<T>(arena, plan.apart || plan.key_tiles == 1 ? 0 : slabs * plan.rows_of(0) * plan.tile);
  const int64_t kept_keys = of_rows ? planes * plan.runs * p.key_length : 0;
  plan.grad_key = take<T>(arena, kept_keys * key_width);
  plan.grad_value = take<T>(arena, kept_keys * value_width);
  plan.scratch = take<char>(arena, 0);
  const int64_t start = arena.used;
  lay_out_backward<E>(p, arena);
  plan.scratch_bytes = arena.used - start;
  arena.used = start + workers * plan.scratch_bytes;
  return plan;
}

}  // namespace
}  // namespace scaledot
