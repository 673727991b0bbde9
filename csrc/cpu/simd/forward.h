// The forward pass, once, for every instruction set, storage type and operand type.
//
//   for each tile of rows:  m = -inf, l = 0, O = 0
//     for each tile of keys that the mask leaves:
//       S = scores(Q K^T)                             (scores.h)
//       m' = max(m, rowmax S)      P = exp(S - m')    l = l exp(m - m') + rowsum P
//       O = O exp(m - m') + drop(P) V
//     output = O / (l (1 - dropout_p))                lse = m + log l
//   where the keys and values of a head are more than the last-level cache is trusted to hold, all rows first see a run of keys that
//   are not; m, l and O wait in memory until it is the next run's turn
//     weights, if asked for: drop(P) exp(m' - m) / (l (1 - dropout_p)), where m' is the maximum that P was taken with and m the last one;
//     where P of all keys is too much to keep: a second pass over the keys, drop(exp(S - m)) / (l (1 - dropout_p))
//   the mean of the weights over the heads, if that is asked for: a task is then a tile of rows of all heads, and adds them up
// Online softmax: Milakov and Gimelshein 2018; tiled attention: Rabe and Staats 2021, Dao et al. 2022.
#pragma once

#include "core/arena.h"
#include "core/dispatch.h"
#include "cpu/simd/scores.h"

namespace scaledot {
namespace {

// K^T and V are packed once for each (batch, kv_head) plane. Where planes are many and small, a task packs a plane and attends to it
// at once, while it lies in the second-level cache; otherwise packing is a phase of its own, of as many planes as fit in the budget,
// and row tiles are the tasks.
constexpr int64_t kManyPlanes = 64;
constexpr int64_t kSmallPlane = int64_t(512) << 10;
// Bytes, of packed planes and of outputs that wait: enough planes for all workers, but no more of the workspace than need be. What
// malloc has to ask of the system (glibc: blocks of 32 MiB), it asks for at every call, and every page of it is new.
constexpr int64_t kPackBudget = int64_t(12) << 20;
constexpr int64_t kPackBudgetOfWorker = int64_t(1) << 20;
constexpr int64_t kKeptBudget = int64_t(1) << 20;  // bytes of P that a worker keeps
// Of packed keys and values, what the last-level cache is trusted to hold for tasks that run side by side. Every row tile reads all that
// it sees of its plane's: planes in turn, or longer ones than this, would have each of them read from memory.
constexpr int64_t kSharedCache = int64_t(2) << 20;
constexpr int64_t kFewTiles = 4;  // of rows: that these share what they read is not worth a run

// Sizes of one plane's packed keys and values, in operands.
template <class E>
struct PackedPlane {
  int64_t key_tile;    // K^T of kTileKeys keys: panels of key columns, head_dim deep
  int64_t value_tile;  // V of kTileKeys keys: panels of value columns, kTileKeys deep
  int64_t tiles;

  explicit PackedPlane(const Problem& p)
      : key_tile(kTileKeys * steps_of<E>(p.head_dim)),
        value_tile(steps_of<E>(kTileKeys) * padded<SumOf<E>>(p.value_dim)),
        tiles(ceil_div(p.key_length, kTileKeys)) {}

  int64_t bytes() const { return tiles * (key_tile + value_tile) * int64_t(sizeof(E)); }
};

template <class E>
struct ForwardScratch {
  using T = SumOf<E>;
  NumberOf<E>* numbers;  // a square of rows on their way to operands
  E* query;              // rows
  T* scores;             // (kTileRows, kRowStride<T>)
  E* weights;            // rows; where operands are plain numbers, the scores themselves
  T* output;             // (kTileRows, value_dim padded)
  SoftmaxRows<T> softmax;
  RowTerms<T> terms;
  // P of every key tile, until the last maximum is known; nullptr: not kept.
  T* kept;            // (key tile, kTileRows, kRowStride<T>)
  T* kept_reference;  // (key tile, kTileRows): what the row's scores were compared with
  Range* kept_keys;   // (key tile)
  T* mean;            // (rows of a tile, mean_stride): weights summed over the heads
};

// Rows of operands, `cols` numbers each, in as many blocks of kTileRows rows as multiply() reads.
template <class E>
E* take_rows(Arena& arena, int64_t cols) {
  return take<E>(arena, ceil_div(steps_of<E>(cols), int64_t(kRowSteps<E>)) * kTileRows * kRowStride<E>);
}

template <class T>
int64_t mean_stride(const Problem& p) {
  return round_up(p.key_length, int64_t(kLanes<T>));
}

template <class E>
ForwardScratch<E> lay_out_forward(const Problem& p, Arena& arena) {
  using T = SumOf<E>;
  ForwardScratch<E> s;
  s.numbers = take<NumberOf<E>>(arena, kLanes<T> * padded<T>(max(p.head_dim, p.value_dim)));
  s.query = take_rows<E>(arena, p.head_dim);
  s.scores = take<T>(arena, kTileRows * kRowStride<T>);
  if constexpr (kNumbers<E> == 1)
    s.weights = s.scores;
  else
    s.weights = take_rows<E>(arena, kTileKeys);
  s.output = take<T>(arena, kTileRows * padded<T>(p.value_dim));
  s.softmax = lay_out_softmax<T>(arena, kTileRows);
  s.terms = lay_out_row<T>(arena);
  const int64_t tiles = p.weights.data ? ceil_div(p.key_length, kTileKeys) : 0;
  const int64_t size = tiles * kTileRows * kRowStride<T>;
  s.kept = nullptr;
  if (0 < size && size * int64_t(sizeof(T)) <= kKeptBudget) {
    s.kept = take<T>(arena, size);
    s.kept_reference = take<T>(arena, tiles * kTileRows);
    s.kept_keys = take<Range>(arena, tiles);
  }
  s.mean = averages_weights(p) ? take<T>(arena, tile_problem(p, Cut::tapered).rows * mean_stride<T>(p)) : nullptr;
  return s;
}

template <class E>
struct ForwardPlan {
  PackedPlane<E> plane;
  bool plane_tasks;    // a task is a plane
  bool head_tasks;     // a task is a tile of rows of all heads of a batch entry
  int64_t slots;       // packed planes that there is room for
  int64_t runs;        // of neighbouring key tiles
  E* keys;             // (slot, tile)
  E* values;           // (slot, tile)
  bool* value_finite;  // (slot, tile)
  // With several runs, what waits for the next.
  SoftmaxRows<SumOf<E>> softmax;  // (slot, row of all heads)
  SumOf<E>* output;               // (slot, row of all heads, value_dim padded)
  char* scratch;                  // of worker 0
  int64_t scratch_bytes;
};

// Under a window on the left a row tile reads few of the keys, which its neighbours read too.
template <class E>
int64_t key_runs(const Problem& p, const PackedPlane<E>& plane) {
  if (p.weights.data || p.query_length <= kFewTiles * kTileRows) return 1;
  if (row_keys(p, p.query_length - 1).begin > 0) return 1;
  return max<int64_t>(min(ceil_div(plane.bytes(), kSharedCache), plane.tiles), 1);
}

template <class E>
ForwardPlan<E> plan_forward(const Problem& p, int workers, Arena& arena) {
  using T = SumOf<E>;
  const PackedPlane<E> plane(p);
  ForwardPlan<E> plan = {
      plane, false, averages_weights(p), 1, key_runs(p, plane), nullptr, nullptr, nullptr, {}, nullptr, nullptr, 0};
  const int64_t planes = p.batch * p.kv_heads, bytes = plan.plane.bytes();
  const int64_t budget = max(kPackBudget, workers * kPackBudgetOfWorker);
  plan.plane_tasks = planes >= kManyPlanes && bytes <= kSmallPlane && !plan.head_tasks;
  plan.slots = plan.plane_tasks ? workers : max<int64_t>(min(budget / max<int64_t>(bytes, 1), planes), 1);
  const int64_t rows = plan.runs > 1 ? p.heads / p.kv_heads * p.query_length : 0, width = padded<T>(p.value_dim);
  if (rows > 0) plan.slots = max<int64_t>(min(plan.slots, budget / (rows * width * int64_t(sizeof(T)) + 1)), 1);
  if (plan.head_tasks) plan.slots = max<int64_t>(plan.slots / p.kv_heads, 1) * p.kv_heads;
  plan.keys = take<E>(arena, plan.slots * plan.plane.tiles * plan.plane.key_tile);
  plan.values = take<E>(arena, plan.slots * plan.plane.tiles * plan.plane.value_tile);
  plan.value_finite = take<bool>(arena, plan.slots * plan.plane.tiles);
  plan.softmax = lay_out_softmax<T>(arena, plan.slots * rows);
  plan.output = take<T>(arena, plan.slots * rows * width);
  plan.scratch = take<char>(arena, 0);
  const int64_t start = arena.used;
  lay_out_forward<E>(p, arena);
  plan.scratch_bytes = arena.used - start;
  arena.used = start + workers * plan.scratch_bytes;
  return plan;
}

inline Range key_tile(const Problem& p, int64_t tile) {
  return {tile * kTileKeys, min((tile + 1) * kTileKeys, p.key_length)};
}

// body(keys) for each tile of keys that reaches into the range.
template <class Body>
void for_each_tile(const Problem& p, Range range, const Body& body) {
  for (int64_t t = range.begin / kTileKeys; t * kTileKeys < range.end; ++t) body(key_tile(p, t));
}

template <class Storage, class E>
class Forward {
  using T = SumOf<E>;

 public:
  Forward(const Problem& p, const ForwardPlan<E>& plan)
      : p_(p),
        plan_(plan),
        tiling_(tile_problem(p, Cut::tapered)),
        unit_(unit_of<T>(p)),
        width_(padded<T>(p.value_dim)) {}

  int64_t row_tiles() const { return tiles_per_plane(tiling_); }

  // Which of the row tiles of `planes` planes is the task `number`: a few planes after the other, of each few the longest tiles first;
  // at the end what was cut into small ones.
  struct PlaneTile {
    int64_t plane, index;
  };
  PlaneTile task(int64_t number, int64_t planes) const {
    const int64_t whole = tiling_.row_tiles * tiling_.head_tiles, rest = number - planes * whole;
    if (rest >= 0) return {rest % planes, whole + rest / planes};
    const int64_t few = max<int64_t>(kSharedCache * plan_.runs / max<int64_t>(plan_.plane.bytes(), 1), 1);
    const int64_t first = number / (few * whole) * few, among = min(few, planes - first),
                  at = number - first * whole;
    return {first + at % among, at / among};
  }

  int64_t key_tiles() const { return plan_.plane.tiles; }

  void pack(int64_t plane, int64_t slot, int64_t tile, int worker) const {
    const ForwardScratch<E> s = scratch(worker);
    const int64_t batch = plane / p_.kv_heads, head = plane % p_.kv_heads;
    const Range keys = key_tile(p_, tile);
    Panels<E> k = key_panels(slot, tile), v = value_panels(slot, tile);
    pack_panels_transposed<E>(key_rows<Storage>(p_, p_.key, batch, head, keys), count(keys), p_.head_dim, s.numbers, k);
    pack_panels<E>(key_rows<Storage>(p_, p_.value, batch, head, keys), count(keys), p_.value_dim, s.numbers, v);
    plan_.value_finite[slot * plan_.plane.tiles + tile] = v.finite;
  }

  // Tile `index` of a plane's rows against the keys of one run. The runs of a tile come one after the other.
  void run(int64_t plane, int64_t slot, int64_t index, int64_t key_run, int worker) const {
    const RowTile tile = row_tile(p_, tiling_, plane, index);
    ForwardScratch<E> s = scratch(worker);
    if (plan_.runs > 1) {
      const int64_t first_head = tile.first_head - tile.kv_head * (p_.heads / p_.kv_heads);
      const int64_t row = (slot * (p_.heads / p_.kv_heads) + first_head) * p_.query_length + tile.rows.begin;
      s.softmax = from_row(plan_.softmax, row);
      s.output = plan_.output + row * width_;
    }
    run_tile(tile, slot, {key_tiles() * key_run / plan_.runs, key_tiles() * (key_run + 1) / plan_.runs}, s);
  }

  // How many tiles of rows of all heads there are.
  int64_t head_rows() const { return tiling_.row_tiles + tiling_.strip_tiles; }

  // Tile `number` of these. The planes of the batch entry are packed from `slot` on.
  void run_heads(int64_t batch, int64_t slot, int64_t number, int worker) const {
    const ForwardScratch<E> s = scratch(worker);
    RowTile tile = row_tile(p_, tiling_, batch * p_.kv_heads, number * tiling_.head_tiles);
    clear_row(s.mean, count(tile.rows) * mean_stride<T>(p_));
    for (int64_t kv_head = 0; kv_head < p_.kv_heads; ++kv_head)
      for (int64_t k = 0; k < tiling_.head_tiles; ++k) {
        tile = row_tile(p_, tiling_, batch * p_.kv_heads + kv_head, number * tiling_.head_tiles + k);
        run_tile(tile, slot + kv_head, {0, key_tiles()}, s);
      }
    for (int64_t r = 0; r < count(tile.rows); ++r)
      narrow_row(s.mean + r * mean_stride<T>(p_), T(1) / T(p_.heads), p_.key_length, weights_row(tile, r));
  }

 private:
  // The rows of a tile against the given tiles of keys.
  void run_tile(const RowTile& tile, int64_t slot, Range key_tiles, const ForwardScratch<E>& s) const {
    if (const Range seen = seen_tiles(tile, key_tiles); count(seen) > 0) {
      pack_rows<E>(block<Storage>(p_, p_.query, tile), tile_rows(tile), p_.head_dim, s.query);
      prefetch_mask(p_, tile, seen_keys(p_, tile, key_tile(p_, seen.begin)));
    }
    const bool kept =
        p_.dropout_p > 0 ? attend<true>(tile, slot, key_tiles, s) : attend<false>(tile, slot, key_tiles, s);
    if (key_tiles.end < this->key_tiles()) return;
    finish(tile, s);
    if (!p_.weights.data) return;
    if (kept && finite_normalisers(tile, s))
      write_kept(tile, s);
    else
      write_weights(tile, slot, s);
  }

  ForwardScratch<E> scratch(int worker) const {
    Arena arena = {plan_.scratch + worker * plan_.scratch_bytes, 0};
    return lay_out_forward<E>(p_, arena);
  }

  Panels<E> key_panels(int64_t slot, int64_t tile) const {
    return {plan_.keys + (slot * plan_.plane.tiles + tile) * plan_.plane.key_tile, kPanel<E> * steps_of<E>(p_.head_dim),
            true};
  }
  Panels<E> value_panels(int64_t slot, int64_t tile) const {
    const int64_t index = slot * plan_.plane.tiles + tile;
    return {plan_.values + index * plan_.plane.value_tile, kPanel<E> * steps_of<E>(kTileKeys),
            plan_.value_finite[index]};
  }

  // A tile of keys and these rows' dot products with it.
  struct Visit {
    int64_t number;
    Range keys;        // that are left
    Panels<E> values;  // of them
    TileTerms terms;
    T* scores;
  };

  // Of the given tiles of keys, those that these rows see by position.
  Range seen_tiles(const RowTile& tile, Range key_tiles) const {
    const Range range = key_range(p_, tile.rows);
    return intersect({range.begin / kTileKeys, ceil_div(range.end, int64_t(kTileKeys))}, key_tiles);
  }

  // body(visit) for each of the tiles of keys of which the mask leaves any to these rows. kept: scores get memory of their own each.
  template <class Body>
  void for_each_key_tile(const RowTile& tile, int64_t slot, Range key_tiles, const ForwardScratch<E>& s, bool kept,
                         const Body& body) const {
    const Range seen = seen_tiles(tile, key_tiles);
    for (int64_t t = seen.begin; t < seen.end; ++t) {
      const Range all = key_tile(p_, t), keys = seen_keys(p_, tile, all);
      if (excluded(p_, tile, keys)) continue;
      const int64_t first = keys.begin - all.begin;
      T* scores = kept ? s.kept + t * kTileRows * kRowStride<T> : s.scores;
      multiply<Layout::rows, Terms::all>(tile_rows(tile), count(keys), steps_of<E>(p_.head_dim), s.query,
                                         key_panels(slot, t).from_column(first), scores, kRowStride<T>, false);
      body(Visit{t, keys, value_panels(slot, t).from_step(steps_of<E>(first)), tile_terms<T>(p_, tile, keys), scores});
    }
  }

  // Whether P was kept as write_kept needs it.
  template <bool kDropout>
  bool attend(const RowTile& tile, int64_t slot, Range key_tiles, const ForwardScratch<E>& s) const {
    const int64_t rows = tile_rows(tile);
    RowTerms<T> row = s.terms;
    bool begun = key_tiles.begin > 0, kept = s.kept != nullptr;
    for (int64_t r = 0; r < rows && !begun; ++r) reset(s.softmax, r);
    for (int64_t t = 0; kept && t < key_tiles.end; ++t) s.kept_keys[t] = {0, 0};
    for_each_key_tile(tile, slot, key_tiles, s, s.kept != nullptr, [&](const Visit& v) {
      E* weights = s.weights;
      if constexpr (kNumbers<E> == 1) weights = v.scores;
      for (int64_t r = 0; r < rows; ++r) {
        T* scores = v.scores + r * kRowStride<T>;
        E* line = weights + r * kRowStride<E>;
        load_terms(p_, tile, r, v.keys, v.terms, kNextKeys, row, r > 0);
        finish_scores<T>(p_, v.terms, row, v.keys, scores, nullptr);
        softmax_row<E, kDropout>(v.terms, row, v.keys, unit_, s.softmax, r, scores, line, kept, s.output + r * width_,
                                 width_);
        if (!v.values.finite) mark_masked(v.terms, row, v.keys, reinterpret_cast<NumberOf<E>*>(line), 1);
        if (kept) s.kept_reference[v.number * kTileRows + r] = s.softmax.reference[r];
      }
      multiply<Layout::rows, Terms::live>(rows, p_.value_dim, steps_of<E>(count(v.keys)), weights, v.values, s.output,
                                          width_, begun);
      begun = true;
      kept = kept && v.values.finite;  // marked weights are not what is returned
      if (kept) s.kept_keys[v.number] = v.keys;
    });
    if (!begun) clear_row(s.output, rows * width_);
    return kept;
  }

  void finish(const RowTile& tile, const ForwardScratch<E>& s) const {
    const T kept = T(dropout_scale(p_));
    int64_t r = 0;
    for (int64_t head = tile.first_head; head < tile.first_head + tile.heads; ++head) {
      Storage* output = at<Storage>(p_, p_.output, tile.batch, head);
      T* lse = at<T>(p_, p_.lse, tile.batch, head);
      for (int64_t i = tile.rows.begin; i < tile.rows.end; ++i, ++r) {
        const RowState<T> state = state_of(s.softmax, r, unit_);
        narrow_row(s.output + r * width_, normaliser(state) * kept, p_.value_dim, output + i * p_.output.row_stride);
        if (lse) lse[i * p_.lse.row_stride] = logsumexp(state);
      }
    }
  }

  T weights_factor(const ForwardScratch<E>& s, int64_t r) const {
    return normaliser(state_of(s.softmax, r, unit_)) * T(dropout_scale(p_));
  }

  // Where one is not, masked weights are 0 all the same, and only the mask tells which these are.
  bool finite_normalisers(const RowTile& tile, const ForwardScratch<E>& s) const {
    bool finite = true;
    for (int64_t r = 0; r < tile_rows(tile); ++r) finite &= weights_factor(s, r) - weights_factor(s, r) == T(0);
    return finite;
  }

  void write_kept(const RowTile& tile, const ForwardScratch<E>& s) const {
    for (int64_t r = 0; r < tile_rows(tile); ++r) {
      const T factor = weights_factor(s, r), reference = s.softmax.reference[r];
      int64_t written = 0;
      for (int64_t t = 0; t < key_tiles(); ++t) {
        const Range keys = s.kept_keys[t];
        if (count(keys) <= 0) continue;
        put_zeros(tile, r, {written, keys.begin});
        const T taken = s.kept_reference[t * kTileRows + r];
        const T raised = taken == reference ? T(1) : maximum_of(exp2(Vec<T>((taken - reference) * unit_.log2)));
        put_weights(tile, r, keys, s.kept + (t * kTileRows + r) * kRowStride<T>, raised * factor, s);
        written = keys.end;
      }
      put_zeros(tile, r, {written, p_.key_length});
    }
  }

  // Where weights go: to memory, or to the sum over the heads, which begins as 0. Past the last key, up to a whole vector, they are 0.
  void put_weights(const RowTile& tile, int64_t r, Range keys, const T* from, T factor,
                   const ForwardScratch<E>& s) const {
    if (!plan_.head_tasks) return narrow_row(from, factor, count(keys), weights_row(tile, r) + keys.begin);
    T* to = s.mean + (row_of(tile, r) - tile.rows.begin) * mean_stride<T>(p_) + keys.begin;
    for (int64_t k = 0; k < count(keys); k += kLanes<T>)
      store(to + k, fma(load(from + k), Vec<T>(factor), load(to + k)));
  }
  void put_zeros(const RowTile& tile, int64_t r, Range keys) const {
    if (!plan_.head_tasks) clear_row(weights_row(tile, r) + keys.begin, count(keys));
  }

  void write_weights(const RowTile& tile, int64_t slot, const ForwardScratch<E>& s) const {
    RowTerms<T> row = s.terms;
    int64_t written = 0;  // keys, the same for all rows
    const auto clear_to = [&](int64_t end) {
      for (int64_t r = 0; r < tile_rows(tile); ++r) put_zeros(tile, r, {written, end});
    };
    for_each_key_tile(tile, slot, {0, key_tiles()}, s, false, [&](const Visit& v) {
      clear_to(v.keys.begin);
      written = v.keys.end;
      for (int64_t r = 0; r < tile_rows(tile); ++r) {
        T* scores = v.scores + r * kRowStride<T>;
        load_terms(p_, tile, r, v.keys, v.terms, kNextKeys, row, r > 0);
        finish_scores<T>(p_, v.terms, row, v.keys, scores, nullptr);
        weights_of(v.terms, row, v.keys, r, weights_factor(s, r), s, scores);
        put_weights(tile, r, v.keys, scores, T(1), s);
      }
    });
    clear_to(p_.key_length);
  }

  // Scores to factor * drop(exp(score - reference)), in place; 0 at masked keys even if the factor is NaN.
  void weights_of(const TileTerms& terms, const RowTerms<T>& row, Range keys, int64_t r, T factor,
                  const ForwardScratch<E>& s, T* scores) const {
    const Range seen = seen_vectors(terms, row, keys);
    const Vec<T> reference(shift(s.softmax.reference[r])), log2(unit_.log2), zero(T(0)), times(factor);
    for (int64_t k = 0; k < seen.begin; k += kLanes<T>) store(scores + k, zero);
    for (int64_t k = seen.begin; k < seen.end; k += kLanes<T>) {
      Vec<T> w = exp2((load(scores + k) - reference) * log2) * times;
      if (p_.dropout_p > 0) w = select(kept_lanes(row, k), w, w * zero);
      store(scores + k, w);
    }
    for (int64_t k = seen.end; k < count(keys); k += kLanes<T>) store(scores + k, zero);
    if (!(factor - factor == T(0))) {
      mark_masked(terms, row, keys, scores, 1);
      for (int64_t k = 0; k < count(keys); ++k) scores[k] = is_skip(scores[k]) ? T(0) : scores[k];
    }
  }

  Storage* weights_row(const RowTile& tile, int64_t r) const {
    return at<Storage>(p_, p_.weights, tile.batch, head_of(tile, r)) + row_of(tile, r) * p_.weights.row_stride;
  }

  const Problem& p_;
  const ForwardPlan<E>& plan_;
  const Tiling tiling_;
  const Unit<T> unit_;
  const int64_t width_;
};

template <class Storage, class E>
void run_forward(const Problem& p, const Executor& executor) {
  Arena arena = {static_cast<char*>(executor.workspace), 0};
  const ForwardPlan<E> plan = plan_forward<E>(p, executor.workers, arena);
  const Forward<Storage, E> pass(p, plan);
  const int64_t planes = p.batch * p.kv_heads, key_tiles = pass.key_tiles(), row_tiles = pass.row_tiles();
  if (plan.plane_tasks) {
    parallel(executor, planes, [&](int64_t plane, int worker) {
      for (int64_t tile = 0; tile < key_tiles; ++tile) pass.pack(plane, worker, tile, worker);
      for (int64_t tile = 0; tile < row_tiles; ++tile) pass.run(plane, worker, tile, 0, worker);
    });
    return;
  }
  for (int64_t first = 0; first < planes; first += plan.slots) {
    const int64_t now = min(plan.slots, planes - first);
    parallel(executor, now * key_tiles, [&](int64_t task, int worker) {
      pass.pack(first + task / key_tiles, task / key_tiles, task % key_tiles, worker);
    });
    if (plan.head_tasks) {
      const int64_t batches = now / p.kv_heads;
      parallel(executor, batches * pass.head_rows(), [&](int64_t task, int worker) {
        const int64_t batch = task % batches;
        pass.run_heads(first / p.kv_heads + batch, batch * p.kv_heads, task / batches, worker);
      });
      continue;
    }
    for (int64_t key_run = 0; key_run < plan.runs; ++key_run)
      parallel(executor, now * row_tiles, [&](int64_t number, int worker) {
        const auto [plane, index] = pass.task(number, now);
        pass.run(first + plane, plane, index, key_run, worker);
      });
  }
}

}  // namespace
}  // namespace scaledot
