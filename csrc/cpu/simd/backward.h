// The backward pass, once, for every instruction set, storage type and operand type. Nothing of size (query_length, key_length) is
// kept: the weights are recomputed from lse.
//
//   delta_i = sum_d dO_id O_id + sum_j dW_ij W_ij - dlse_i                      (W: the returned weights, if any)
//   for each tile of keys, for each tile of rows that sees it:
//     S  = scores(Q K^T)          P  = exp(S - lse)           Pd = keep P            (see SplitLse about lse)
//     dP = keep (dO V^T + dW) / (1 - dropout_p)
//     dS = P (dP - delta)         dX = slope dS               (slope: of the softcap; 0 where the mask replaced the score)
//     dV += Pd^T dO               dK += dX^T Q                dQ += dX K             dMask += dS
//   dV /= 1 - dropout_p           dK *= scale                 dQ *= scale
// Dao et al., "FlashAttention", 2022, appendix B.
//
// A task is a run of key tiles of one (batch, kv_head) plane, or of all planes that share a mask which gets a gradient: it owns its dK
// and dV. It adds its part of dQ to a slab of its own; the slabs are summed in order. Where dK and dV are less than dQ, as when several
// query heads share a key head, a task is a run of row tiles instead: it owns its dQ, and adds up dK and dV of its own, which are summed
// in order. How many tasks there are depends on the shape alone.
// Where all keys that a row sees are in one tile, its sum and delta are taken from the tile of scores itself, which is more exact than lse
// and output: under a causal mask the first rows have the largest gradients, and of few weights the rounding errors do not average out.
// Where there is but one tile of keys, dQ is complete with the first product: nothing is prepared and there are no slabs.
// With more threads than such tasks, each key tile is a task for dK and dV, and each row tile one for dQ, which costs S and dP a second
// time. They sum in the order that the runs would have: the results are the same, bit for bit.
#pragma once

#include "cpu/simd/score_gradients.h"

namespace scaledot {
namespace {

template <class Storage, class E>
class Backward {
  using T = SumOf<E>;

 public:
  Backward(const Problem& p, const BackwardPlan<E>& plan, const MaskGradient<T>& mask)
      : p_(p),
        plan_(plan),
        mask_(mask),
        tiling_(tile_problem(p, Cut::even)),
        rows_(p, plan),
        gradients_(p, mask),
        one_tile_(plan.key_tiles == 1),
        products_(one_tile_ ? factors(p) : Factors{1, 1}),
        stores_(one_tile_ ? Factors{1, 1} : factors(p)) {}

  void prepare_rows(int64_t plane, int64_t index, int worker) const {
    rows_.prepare(row_tile(p_, tiling_, plane, index), plan_.row_tiles == 1, scratch(worker));
  }

  // What a run of all planes of a class adds to dK, dV, dQ and the mask's gradient.
  void run(int64_t gradient_class, int64_t run, int worker) const {
    BackwardScratch<E> s = scratch(worker);
    const Range keys = plan_.keys_of(run);
    const int64_t rows = plan_.rows_of(run);
    for_each_plane(p_, gradient_class, [&](int64_t plane) {
      T* grad_query = grad_query_of(plane, run, worker);
      if (!one_tile_) clear_row(grad_query, rows * plan_.tile);
      for (int64_t t = keys.begin; t < keys.end; ++t) run_key_tile(plane, t, run, grad_query, s);
      if (one_tile_ || plan_.sums_grad_query()) return;
      for (int64_t n = 0; n < rows; ++n)
        store_row_tile(row_tile(p_, tiling_, plane, plan_.row_tile_of(run, n)), grad_query + n * plan_.tile);
    });
    mask_.end_task();
  }

  // What a run of rows, or all, adds to dK and dV of one key tile alone.
  void run_keys(int64_t plane, int64_t t, int64_t run, int worker) const {
    BackwardScratch<E> s = scratch(worker);
    run_key_tile(plane, t, run, nullptr, s);
  }

  // dQ of one row tile alone.
  void run_rows(const Tiling& tiling, int64_t plane, int64_t index, int worker) const {
    BackwardScratch<E> s = scratch(worker);
    const RowTile tile = row_tile(p_, tiling, plane, index);
    const int64_t width = padded<T>(p_.head_dim), size = tile_rows(tile) * width;
    for (int64_t run = 0; run < (plan_.sums_grad_query() ? plan_.runs : 1); ++run) {
      T* sum = run == 0 ? s.grad_query : s.grad_query_part;
      clear_row(sum, size);
      const Range tiles = plan_.keys_of(run);
      for (int64_t t = tiles.begin; t < tiles.end; ++t) {
        const Range all = key_tile(p_, t), keys = seen_keys(p_, tile, all);
        if (excluded(p_, tile, keys)) continue;
        load_key_tile(tile.batch, tile.kv_head, all, s);
        load_row_tile(tile, s);
        gradients_.run(tile, keys, keys.begin - all.begin, run, kNextKeys, s);
        add_grad_query(tile, keys, keys.begin - all.begin, sum, true, s);
      }
      if (run > 0) add_rows(sum, size, true, s.grad_query);
    }
    store_row_tile(tile, s.grad_query);
  }

  // dQ of a row tile: what the runs of keys add to it.
  void sum_grad_query(int64_t plane, int64_t index) const {
    T* slabs = grad_query_of(plane, 0, 0) + index * plan_.tile;
    store_row_tile(row_tile(p_, tiling_, plane, index), sum_runs(slabs, plan_.row_tiles * plan_.tile, plan_.tile));
  }

  // dK and dV of a tile of keys: what the runs of rows add to them.
  void sum_grad_key(int64_t plane, int64_t t) const {
    const int64_t key_width = padded<T>(p_.head_dim), value_width = padded<T>(p_.value_dim);
    const Range keys = key_tile(p_, t);
    const T* key = sum_runs(grad_key_of(plane, 0, keys), p_.key_length * key_width, count(keys) * key_width);
    const T* value = sum_runs(grad_value_of(plane, 0, keys), p_.key_length * value_width, count(keys) * value_width);
    store_key_tile(plane, keys, key, value);
  }

 private:
  // What remains to be multiplied with: where a result is the sum of few products, by these, otherwise when it is stored.
  struct Factors {
    T scores;   // dQ, dK
    T weights;  // dV
  };
  static Factors factors(const Problem& p) { return {T(p.scale), T(dropout_scale(p))}; }

  BackwardScratch<E> scratch(int worker) const {
    Arena arena = {plan_.scratch + worker * plan_.scratch_bytes, 0};
    return lay_out_backward<E>(p_, arena);
  }

  void load_key_tile(int64_t batch, int64_t kv_head, Range keys, BackwardScratch<E>& s) const {
    const Block<Storage> key = block<Storage>(p_, p_.key, batch, kv_head, keys.begin);
    const Block<Storage> value = block<Storage>(p_, p_.value, batch, kv_head, keys.begin);
    pack_panels_transposed<E>(key, count(keys), p_.head_dim, s.numbers, s.key_columns);
    pack_panels_transposed<E>(value, count(keys), p_.value_dim, s.numbers, s.value_columns);
    s.keys.stride = steps_of<E>(count(keys)) * kPanel<E>;
    pack_panels<E>(key, count(keys), p_.head_dim, s.numbers, s.keys);
  }

  void load_row_tile(const RowTile& tile, BackwardScratch<E>& s) const {
    const int64_t rows = tile_rows(tile);
    s.queries.stride = s.grad_outputs.stride = steps_of<E>(rows) * kPanel<E>;
    const Block<Storage> query = block<Storage>(p_, p_.query, tile);
    pack_rows<E>(query, rows, p_.head_dim, s.query);
    pack_panels<E>(query, rows, p_.head_dim, s.numbers, s.queries);
    if (p_.grad_output.data) {
      const Block<Storage> grad = block<Storage>(p_, p_.grad_output, tile);
      pack_rows<E>(grad, rows, p_.value_dim, s.grad_output);
      pack_panels<E>(grad, rows, p_.value_dim, s.numbers, s.grad_outputs);
    }
    rows_.fill(tile, s);
    T zero = T(0);  // x - x is 0 for finite x, NaN otherwise
    for (int64_t r = 0; r < rows; ++r) zero += (s.delta[r] - s.delta[r]) + (s.shift[r].offset - s.shift[r].offset);
    s.finite = zero == T(0) && s.queries.finite && s.grad_outputs.finite && s.keys.finite && s.value_columns.finite;
  }

  // Where a run adds up dQ of its row tiles.
  T* grad_query_of(int64_t plane, int64_t run, int worker) const {
    const int64_t slab = plan_.sums_grad_query() ? plane * plan_.runs + run : worker;
    return plan_.grad_query + slab * plan_.rows_of(0) * plan_.tile;
  }

  // Where a run of rows adds up dK and dV of some keys.
  T* grad_key_of(int64_t plane, int64_t run, Range keys) const {
    return plan_.grad_key + ((plane * plan_.runs + run) * p_.key_length + keys.begin) * padded<T>(p_.head_dim);
  }
  T* grad_value_of(int64_t plane, int64_t run, Range keys) const {
    return plan_.grad_value + ((plane * plan_.runs + run) * p_.key_length + keys.begin) * padded<T>(p_.value_dim);
  }

  void run_key_tile(int64_t plane, int64_t t, int64_t run, T* grad_query, BackwardScratch<E>& s) const {
    const int64_t batch = plane / p_.kv_heads, kv_head = plane % p_.kv_heads, tiles = plan_.rows_of(run);
    const int64_t key_width = padded<T>(p_.head_dim), value_width = padded<T>(p_.value_dim);
    const Range all = key_tile(p_, t);
    prefetch_mask(p_, row_tile(p_, tiling_, plane, plan_.row_tile_of(run, 0)), all);
    load_key_tile(batch, kv_head, all, s);
    // dK and dV, and apart from them what the latest few row tiles add up to: the error of a sum taken term by term grows with the number
    // of terms, and a key may have the rows of many heads.
    T* const grad_key = plan_.sums_grad_key()
                            ? grad_key_of(plane, run, all)
                            : in_place(p_.grad_key, batch, kv_head, all.begin, p_.head_dim, s.grad_key);
    T* const grad_value = plan_.sums_grad_key()
                              ? grad_value_of(plane, run, all)
                              : in_place(p_.grad_value, batch, kv_head, all.begin, p_.value_dim, s.grad_value);
    const bool parts = tiles > kRowTilesOfPart;
    T *const key_part = parts ? s.grad_key_part : grad_key, *const value_part = parts ? s.grad_value_part : grad_value;
    // The first product of a part is not added to anything, unless it leaves out keys or there is none for dV.
    bool begun = false, part_begun = false;
    const auto begin_part = [&] {
      clear_row(key_part, count(all) * key_width);
      clear_row(value_part, count(all) * value_width);
      part_begun = true;
    };
    const auto end_part = [&] {
      if (!parts || !part_begun) return;
      add_rows(key_part, count(all) * key_width, begun, grad_key);
      add_rows(value_part, count(all) * value_width, begun, grad_value);
      begun = true, part_begun = false;
    };
    for (int64_t n = 0; n < tiles; ++n) {
      if (n % kRowTilesOfPart == 0) end_part();
      const RowTile tile = row_tile(p_, tiling_, plane, plan_.row_tile_of(run, n));
      const Range keys = seen_keys(p_, tile, all);
      if (excluded(p_, tile, keys)) {
        if (one_tile_) store_zeros(tile, s);
        continue;
      }
      if (!part_begun && (count(keys) < count(all) || !p_.grad_output.data)) begin_part();
      load_row_tile(tile, s);
      gradients_.run(tile, keys, keys.begin - all.begin, run, {-tiling_.rows, 0}, s);
      const int64_t first_key = keys.begin - all.begin;
      add_products(tile, keys, key_part + first_key * key_width, value_part + first_key * value_width, part_begun, s);
      part_begun = true;
      if (!p_.grad_query.data || plan_.apart) continue;
      if (one_tile_) {
        T* sum = s.grad_query;
        if (tile.heads == 1)
          sum = in_place(p_.grad_query, tile.batch, tile.first_head, tile.rows.begin, p_.head_dim, sum);
        add_grad_query(tile, keys, first_key, sum, false, s);
        store_row_tile(tile, sum);
      } else {
        add_grad_query(tile, keys, first_key, grad_query + n * plan_.tile, true, s);
      }
    }
    if (!part_begun && !begun) begin_part();
    end_part();
    if (!plan_.sums_grad_key()) store_key_tile(plane, all, grad_key, grad_value);
  }

  // sum (+)= part.
  static void add_rows(const T* part, int64_t size, bool begun, T* sum) {
    for (int64_t k = 0; k < size; k += kLanes<T>)
      store(sum + k, begun ? load(sum + k) + load(part + k) : load(part + k));
  }

  // What the runs of a plane keep of a result, `step` apart, summed in order.
  const T* sum_runs(T* first, int64_t step, int64_t size) const {
    for (int64_t run = 1; run < plan_.runs; ++run) add_rows(first + run * step, size, true, first);
    return first;
  }

  // Where rows of a result are summed: in the tensor, if they lie there as they would in `scratch` and nothing remains to be done.
  T* in_place(const TensorView& to, int64_t batch, int64_t head, int64_t row, int64_t cols, T* scratch) const {
    const bool same =
        one_tile_ && sizeof(Storage) == sizeof(T) && to.data && to.col_stride == 1 && to.row_stride == cols;
    return same && cols == padded<T>(cols) ? at<T>(p_, to, batch, head) + row * cols : scratch;
  }

  // dV += Pd^T dO, dK += dX^T Q, of the given keys. begun: there is something to add to.
  void add_products(const RowTile& tile, Range keys, T* grad_key, T* grad_value, bool begun,
                    const BackwardScratch<E>& s) const {
    const int64_t steps = steps_of<E>(tile_rows(tile));
    if (p_.grad_value.data && p_.grad_output.data)
      multiply<Layout::columns, Terms::live>(count(keys), p_.value_dim, steps, s.weights, s.grad_outputs, grad_value,
                                             padded<T>(p_.value_dim), begun, products_.weights);
    if (p_.grad_key.data)
      multiply<Layout::columns, Terms::live>(count(keys), p_.head_dim, steps, s.grad_columns, s.queries, grad_key,
                                             padded<T>(p_.head_dim), begun, products_.scores);
  }

  // dQ += dX K. `first`: of the keys, in the key tile.
  void add_grad_query(const RowTile& tile, Range keys, int64_t first, T* grad_query, bool begun,
                      const BackwardScratch<E>& s) const {
    multiply<Layout::rows, Terms::live>(tile_rows(tile), p_.head_dim, steps_of<E>(count(keys)), s.grad_rows,
                                        s.keys.from_step(steps_of<E>(first)), grad_query, padded<T>(p_.head_dim), begun,
                                        products_.scores);
  }

  // dK and dV of a tile's keys.
  void store_key_tile(int64_t plane, Range keys, const T* grad_key, const T* grad_value) const {
    const int64_t batch = plane / p_.kv_heads, kv_head = plane % p_.kv_heads;
    store_rows(grad_key, padded<T>(p_.head_dim), stores_.scores, p_.grad_key, batch, kv_head, keys, p_.head_dim);
    store_rows(grad_value, padded<T>(p_.value_dim), stores_.weights, p_.grad_value, batch, kv_head, keys, p_.value_dim);
  }

  // dQ of a tile's rows.
  void store_row_tile(const RowTile& tile, const T* from) const {
    const int64_t width = padded<T>(p_.head_dim);
    for (int64_t h = 0; h < tile.heads; ++h)
      store_rows(from + h * count(tile.rows) * width, width, stores_.scores, p_.grad_query, tile.batch,
                 tile.first_head + h, tile.rows, p_.head_dim);
  }
  void store_zeros(const RowTile& tile, const BackwardScratch<E>& s) const {
    clear_row(s.grad_query, tile_rows(tile) * padded<T>(p_.head_dim));
    store_row_tile(tile, s.grad_query);
  }

  // Rows of a result, unless they were summed where they belong.
  void store_rows(const T* from, int64_t width, T factor, const TensorView& to, int64_t batch, int64_t head, Range rows,
                  int64_t cols) const {
    if (!to.data) return;
    Storage* start = at<Storage>(p_, to, batch, head) + rows.begin * to.row_stride;
    if (static_cast<const void*>(start) == from) return;
    for (int64_t i = 0; i < count(rows); ++i) narrow_row(from + i * width, factor, cols, start + i * to.row_stride);
  }

  const Problem& p_;
  const BackwardPlan<E>& plan_;
  const MaskGradient<T>& mask_;
  const Tiling tiling_;
  const BackwardRows<Storage, E> rows_;
  const ScoreGradients<Storage, E> gradients_;
  const bool one_tile_;  // of keys: a row tile's dQ is done when its scores are
  const Factors products_, stores_;
};

template <class Storage, class E>
void run_backward(const Problem& p, const Executor& executor) {
  using T = SumOf<E>;
  Arena arena = {static_cast<char*>(executor.workspace), 0};
  const BackwardPlan<E> plan = plan_backward<E>(p, executor.workers, arena);
  const MaskGradient<T> mask(p, plan.runs, arena);
  const Backward<Storage, E> pass(p, plan, mask);
  const int64_t planes = p.batch * p.kv_heads, tiles = plan.row_tiles;
  if (!plan.whole_rows)
    parallel(executor, planes * tiles,
             [&](int64_t task, int worker) { pass.prepare_rows(task / tiles, task % tiles, worker); });
  if (plan.apart) {
    const int64_t runs = plan.sums_grad_key() ? plan.runs : 1, tasks = planes * plan.key_tiles * runs;
    if (p.grad_key.data || p.grad_value.data)
      parallel(executor, tasks, [&](int64_t task, int worker) {
        pass.run_keys(task % planes, task / planes / runs, task / planes % runs, worker);
      });
    const Tiling tiling = tile_for_workers(p, executor.workers);
    if (p.grad_query.data)
      parallel(executor, planes * tiles_per_plane(tiling),
               [&](int64_t task, int worker) { pass.run_rows(tiling, task % planes, task / planes, worker); });
  } else {
    if (mask.wanted()) mask.clear(executor);
    parallel(executor, plan.classes * plan.runs,
             [&](int64_t task, int worker) { pass.run(task % plan.classes, task / plan.classes, worker); });
  }
  if (plan.sums_grad_key() && (p.grad_key.data || p.grad_value.data))
    parallel(executor, planes * plan.key_tiles,
             [&](int64_t task, int) { pass.sum_grad_key(task % planes, task / planes); });
  if (plan.sums_grad_query() && !plan.apart && p.grad_query.data)
    parallel(executor, planes * tiles, [&](int64_t task, int) { pass.sum_grad_query(task / tiles, task % tiles); });
  if (mask.wanted()) mask.finish(executor);
}

}  // namespace
}  // namespace scaledot
