// The backward pass, once, for every instruction set and operand type. Nothing of size
// (query_length, key_length) is stored: the weights are recomputed from lse, unless the forward saved them.
//
//   delta_i = sum_d dO_id O_id + sum_j dW_ij W_ij - dlse_i                      (W: the returned weights, if any)
//   for each key tile, for each query tile that attends to it:
//     S  = scores(Q K^T)          P  = exp(S - lse)           Pd = keep P            (lse: see RowSoftmax)
//                                 or P as it was saved (core/saved.h), without S
//     dP = keep (dO V^T + dW) / (1 - dropout_p)
//     dS = P (dP - delta)         dX = slope dS             (slope: of the softcap; 0 if the mask replaced the score)
//     dV += Pd^T dO               dK += dX^T Q                dQ += dX K             dMask += dS
//     dBias[distance] += dS       (relative_gradient.h)
//     dNumber[n] += dS f          (captured_gradient.h)
//   dV /= 1 - dropout_p           dK *= scale                 dQ *= scale
// Dao et al., "FlashAttention", 2022, appendix B.
//
// Tasks. Usually a task is a split of the keys of one KV group. It owns its dK and dV, and has a partial
// sum of dQ; the partial sums are added in order. If dK and dV are smaller than dQ, as when several query heads share a
// KV head, a task is a split of the rows instead: it owns its dQ, and has partial sums of dK and dV. If a mask that
// several KV groups share gets a gradient, a task covers these KV groups. The number of tasks depends on the shape
// alone.
//
// Whole rows. If all keys of a row are in one tile, its sum and delta are computed from the tile of scores. That is
// more exact than lse and output: under a causal mask the first rows have the largest gradients, and with few weights
// the rounding errors do not average out. If there is only one key tile, the first product is already dQ: there are no
// partial sums, and no row statistics have to be prepared.
//
// Many threads. With more threads than tasks, each key tile is a task for dK and dV, and each query tile one for dQ.
// That computes S and dP twice, but sums in the same order, so the results are the same, bit for bit.
#pragma once

#include "cpu/simd/attention/next_kv_group.h"
#include "cpu/simd/attention/score_gradients.h"

namespace scaledot {
namespace {

template <class Operand>
class Backward {
  using Sum = SumOf<Operand>;

 public:
  Backward(const Problem& p, const BackwardPlan<Operand>& plan, const MaskGradient<Sum>& mask,
           const RelativeGradient<Sum>& relative, const CapturedGradients<Sum>& captured)
      : p_(p),
        plan_(plan),
        mask_(mask),
        tiling_(backward_tiling(p)),
        statistics_(p, plan),
        gradients_(p, mask, relative, captured),
        one_tile_(plan.key_tiles == 1),
        on_product_(one_tile_ ? factors(p) : Factors{1, 1}),
        on_store_(one_tile_ ? Factors{1, 1} : factors(p)) {}

  void prepare_rows(int64_t kv_group, int64_t index, int worker) const {
    statistics_.prepare(query_tile(p_, tiling_, kv_group, index), plan_.query_tiles == 1, scratch(worker));
  }

  // One split of all KV groups of a class: its part of dK, dV, dQ and the mask's gradient.
  void add_split(int64_t gradient_class, int64_t split, int worker, int workers) const {
    BackwardScratch<Operand> s = scratch(worker);
    const Range keys = plan_.keys_of(split);
    const int64_t tiles = plan_.tiles_of(split);
    for_each_kv_group(p_, gradient_class, [&](int64_t kv_group) {
      prefetch_kv_group(p_, Pass::backward, next_kv_group(p_, kv_group, workers));
      find_shared_key_of(kv_group, s);
      Sum* grad_query = grad_query_of(kv_group, split, worker);
      if (!one_tile_) clear_row(grad_query, tiles * plan_.tile);
      for (int64_t t = keys.begin; t < keys.end; ++t) add_key_tile(kv_group, t, split, grad_query, s);
      if (one_tile_ || plan_.sums_grad_query()) return;
      for (int64_t n = 0; n < tiles; ++n)
        store_query_tile(query_tile(p_, tiling_, kv_group, plan_.tile_of(split, n)), grad_query + n * plan_.tile, s);
    });
    mask_.end_task();
  }

  // One split's part of dK and dV of one key tile, without dQ.
  void add_key_tile_separately(int64_t kv_group, int64_t t, int64_t split, int worker) const {
    BackwardScratch<Operand> s = scratch(worker);
    add_key_tile(kv_group, t, split, nullptr, s);
  }

  // dQ of one query tile, without dK and dV.
  void add_query_tile_separately(const QueryTiling& tiling, int64_t kv_group, int64_t index, int worker) const {
    BackwardScratch<Operand> s = scratch(worker);
    find_shared_key_of(kv_group, s);
    const QueryTile tile = query_tile(p_, tiling, kv_group, index);
    const int64_t size = grad_query_size<Operand>(p_, tile_rows(tile));
    for (int64_t split = 0; split < (plan_.sums_grad_query() ? plan_.splits : 1); ++split) {
      Sum* sum = split == 0 ? s.grad_query : s.grad_query_part;
      clear_row(sum, size);
      const Range tiles = plan_.keys_of(split);
      for (int64_t t = tiles.begin; t < tiles.end; ++t) {
        const Range all = key_tile(p_, t), keys = seen_keys(p_, tile, all);
        if (excluded(p_, tile, keys)) continue;
        load_key_tile(tile.batch, tile.kv_head, all, s);
        load_query_tile(tile, keys, s);
        gradients_.compute(tile, keys, keys.begin - all.begin, split, kNextKeys, s);
        add_grad_query(tile, keys, keys.begin - all.begin, sum, true, s);
      }
      if (split > 0) add_rows(sum, size, true, s.grad_query);
    }
    store_query_tile(tile, s.grad_query, s);
  }

  // dQ of a query tile: the sum over the splits of the keys.
  void sum_grad_query(int64_t kv_group, int64_t index, int worker) const {
    BackwardScratch<Operand> s = scratch(worker);
    find_shared_key_of(kv_group, s);
    Sum* parts = grad_query_of(kv_group, 0, 0) + index * plan_.tile;
    store_query_tile(query_tile(p_, tiling_, kv_group, index),
                     sum_splits(parts, plan_.query_tiles * plan_.tile, plan_.tile), s);
  }

  // dK and dV of a key tile: the sum over the splits of the rows.
  void sum_grad_key(int64_t kv_group, int64_t t) const {
    const int64_t key_width = padded<Sum>(p_.head_dim), value_width = padded<Sum>(p_.value_dim);
    const Range keys = key_tile(p_, t);
    const Sum* key = sum_splits(grad_key_of(kv_group, 0, keys), p_.key_length * key_width, count(keys) * key_width);
    const Sum* value =
        sum_splits(grad_value_of(kv_group, 0, keys), p_.key_length * value_width, count(keys) * value_width);
    store_key_tile(kv_group, keys, key, value);
  }

 private:
  // Scale factors: folded into the GEMM for a single key tile, else applied on the final store.
  struct Factors {
    Sum scores;   // dQ, dK
    Sum weights;  // dV
  };
  static Factors factors(const Problem& p) { return {Sum(p.scale), Sum(dropout_scale(p))}; }

  BackwardScratch<Operand> scratch(int worker) const {
    Arena arena = {plan_.scratch + worker * plan_.scratch_bytes, 0};
    return lay_out_backward<Operand>(p_, arena);
  }

  // Whoever computes dQ of a KV group needs it.
  void find_shared_key_of(int64_t kv_group, BackwardScratch<Operand>& s) const {
    if constexpr (kHasBf16Pairs<Operand>)
      if (p_.grad_query.data) find_shared_key(p_, kv_group / p_.kv_heads, kv_group % p_.kv_heads, s.shared_key);
  }

  // ---------------------------------------------------------------------------------------------------- packing
  SCALEDOT_NOINLINE void load_key_tile(int64_t batch, int64_t kv_head, Range keys, BackwardScratch<Operand>& s) const {
    s.keys.stride = depth_of<Operand>(count(keys)) * kPanel<Operand>;
    with_storage_of<Operand>(p_.dtype, [&]<class Storage>(Type<Storage>) {
      const auto key = key_rows<Storage>(p_, p_.key, batch, kv_head, keys);
      const auto value = key_rows<Storage>(p_, p_.value, batch, kv_head, keys);
      if (!saves_tile(p_, keys))
        pack_panels_transposed<Operand>(key, count(keys), p_.head_dim, s.staging, s.key_columns);
      pack_panels_transposed<Operand>(value, count(keys), p_.value_dim, s.staging, s.value_columns);
      pack_panels<Operand>(key, count(keys), p_.head_dim, s.staging, s.keys);
    });
  }

  // `keys`: those that the tile meets. If their P is saved, no product for the scores needs the rows of the query.
  SCALEDOT_NOINLINE void load_query_tile(const QueryTile& tile, Range keys, BackwardScratch<Operand>& s) const {
    const int64_t rows = tile_rows(tile);
    s.queries.stride = s.grad_outputs.stride = depth_of<Operand>(rows) * kPanel<Operand>;
    const auto pack = [&](const TensorView& view, int64_t cols, Operand* as_rows, Panels<Operand>& as_panels) {
      with_storage_of<Operand>(p_.dtype, [&]<class Storage>(Type<Storage>) {
        const RowBlock<Storage> from = block<Storage>(p_, view, tile);
        if (as_rows) pack_rows<Operand>(from, rows, cols, as_rows);
        pack_panels<Operand>(from, rows, cols, s.staging, as_panels);
      });
    };
    pack(p_.query, p_.head_dim, saves_tile(p_, keys) ? nullptr : s.query, s.queries);
    if (p_.grad_output.data) pack(p_.grad_output, p_.value_dim, s.grad_output, s.grad_outputs);
    statistics_.fill(tile, s);
    Sum zero = Sum(0);  // x - x is 0 for finite x, NaN otherwise
    for (int64_t r = 0; r < rows; ++r) zero += (s.delta[r] - s.delta[r]) + (s.softmax[r].offset - s.softmax[r].offset);
    s.finite = zero == Sum(0) && s.queries.finite && s.grad_outputs.finite && s.keys.finite && s.value_columns.finite;
  }

  // ---------------------------------------------------------------------------------------------------- one key tile
  // Sums dK and dV of a key tile over query tiles. A sum of kQueryTilesPerPartialSum query tiles is taken separately
  // and then added: the error of a sum taken term by term grows with the number of terms, and a key may have the rows
  // of many heads.
  class KeyTileSums {
   public:
    KeyTileSums(int64_t key_size, int64_t value_size, Sum* key, Sum* value, Sum* key_part, Sum* value_part)
        : key_(key),
          value_(value),
          partial_(key_part != nullptr),
          key_part_(partial_ ? key_part : key),
          value_part_(partial_ ? value_part : value),
          key_size_(key_size),
          value_size_(value_size) {}

    Sum* key() const { return key_; }
    Sum* value() const { return value_; }
    // Where products are added; `accumulate`: there is something to add to.
    Sum* key_part() const { return key_part_; }
    Sum* value_part() const { return value_part_; }
    bool accumulate() const { return part_begun_; }

    // Sets the part to 0: needed if its first product leaves out keys, or if there is no product for dV.
    void begin_part() {
      clear_row(key_part_, key_size_);
      clear_row(value_part_, value_size_);
      part_begun_ = true;
    }
    void added() { part_begun_ = true; }
    void end_part() {
      if (!partial_ || !part_begun_) return;
      add_rows(key_part_, key_size_, begun_, key_);
      add_rows(value_part_, value_size_, begun_, value_);
      begun_ = true, part_begun_ = false;
    }
    void finish() {
      if (!part_begun_ && !begun_) begin_part();
      end_part();
    }

   private:
    Sum *const key_, *const value_;
    const bool partial_;
    Sum *const key_part_, *const value_part_;
    const int64_t key_size_, value_size_;
    bool begun_ = false, part_begun_ = false;
  };

  KeyTileSums key_tile_sums(int64_t kv_group, Range keys, int64_t split, const BackwardScratch<Operand>& s) const {
    const int64_t batch = kv_group / p_.kv_heads, kv_head = kv_group % p_.kv_heads;
    Sum* key = s.grad_key;
    Sum* value = s.grad_value;
    if (plan_.sums_grad_key()) {
      key = grad_key_of(kv_group, split, keys);
      value = grad_value_of(kv_group, split, keys);
    } else {
      key = in_place(p_.grad_key, batch, kv_head, keys.begin, p_.head_dim, key);
      value = in_place(p_.grad_value, batch, kv_head, keys.begin, p_.value_dim, value);
    }
    const bool partial = plan_.tiles_of(split) > kQueryTilesPerPartialSum;
    return {count(keys) * padded<Sum>(p_.head_dim), count(keys) * padded<Sum>(p_.value_dim), key, value,
            partial ? s.grad_key_part : nullptr,    partial ? s.grad_value_part : nullptr};
  }

  // dK and dV of key tile t from the query tiles of a split, and their dQ unless it is computed separately.
  SCALEDOT_NOINLINE void add_key_tile(int64_t kv_group, int64_t t, int64_t split, Sum* grad_query,
                                      BackwardScratch<Operand>& s) const {
    const int64_t tiles = plan_.tiles_of(split);
    const Range all = key_tile(p_, t);
    prefetch_mask(p_, query_tile(p_, tiling_, kv_group, plan_.tile_of(split, 0)), all);
    load_key_tile(kv_group / p_.kv_heads, kv_group % p_.kv_heads, all, s);
    KeyTileSums sums = key_tile_sums(kv_group, all, split, s);
    for (int64_t n = 0; n < tiles; ++n) {
      if (n % kQueryTilesPerPartialSum == 0) sums.end_part();
      const QueryTile tile = query_tile(p_, tiling_, kv_group, plan_.tile_of(split, n));
      const Range keys = seen_keys(p_, tile, all);
      if (excluded(p_, tile, keys)) {
        if (one_tile_) store_zeros(tile, s);
        continue;
      }
      if (!sums.accumulate() && (count(keys) < count(all) || !p_.grad_output.data)) sums.begin_part();
      load_query_tile(tile, keys, s);
      const int64_t first_key = keys.begin - all.begin;
      gradients_.compute(tile, keys, first_key, split, {-tiling_.rows, 0}, s);
      add_products(tile, keys, sums.key_part() + first_key * padded<Sum>(p_.head_dim),
                   sums.value_part() + first_key * padded<Sum>(p_.value_dim), sums.accumulate(), s);
      sums.added();
      if (p_.grad_query.data && !plan_.separate_grad_query)
        add_grad_query_of_tile(tile, keys, first_key, grad_query + n * plan_.tile, s);
    }
    sums.finish();
    if (!plan_.sums_grad_key()) store_key_tile(kv_group, all, sums.key(), sums.value());
  }

  // dV += Pd^T dO and dK += dX^T Q for the given keys. `accumulate`: there is something to add to.
  void add_products(const QueryTile& tile, Range keys, Sum* grad_key, Sum* grad_value, bool accumulate,
                    const BackwardScratch<Operand>& s) const {
    const int64_t depth = depth_of<Operand>(tile_rows(tile));
    if (p_.grad_value.data && p_.grad_output.data)
      multiply<Layout::columns, OnMasked::skip>(count(keys), p_.value_dim, depth, s.weights, s.grad_outputs, grad_value,
                                                padded<Sum>(p_.value_dim), accumulate, on_product_.weights);
    if (p_.grad_key.data)
      multiply<Layout::columns, OnMasked::skip>(count(keys), p_.head_dim, depth, s.grad_columns, s.queries, grad_key,
                                                padded<Sum>(p_.head_dim), accumulate, on_product_.scores);
  }

  // dQ of a query tile: complete if there is one key tile, otherwise added to `partial_sum`.
  void add_grad_query_of_tile(const QueryTile& tile, Range keys, int64_t first_key, Sum* partial_sum,
                              const BackwardScratch<Operand>& s) const {
    if (!one_tile_) return add_grad_query(tile, keys, first_key, partial_sum, true, s);
    Sum* sum = s.grad_query;
    if (tile.heads == 1) sum = in_place(p_.grad_query, tile.batch, tile.first_head, tile.rows.begin, p_.head_dim, sum);
    add_grad_query(tile, keys, first_key, sum, false, s);
    store_query_tile(tile, sum, s);
  }

  // dQ += dX K. `first`: of the keys, counted from the key tile's first.
  SCALEDOT_NOINLINE void add_grad_query(const QueryTile& tile, Range keys, int64_t first, Sum* grad_query,
                                        bool accumulate, const BackwardScratch<Operand>& s) const {
    const int64_t rows = tile_rows(tile), width = padded<Sum>(p_.head_dim);
    multiply<Layout::rows, OnMasked::skip>(rows, p_.head_dim, depth_of<Operand>(count(keys)), s.grad_rows,
                                           s.keys.from_depth(depth_of<Operand>(first)), grad_query, width, accumulate,
                                           on_product_.scores);
    if constexpr (kHasBf16Pairs<Operand>)
      if (s.shared_key.large) add_lost(p_, rows, count(keys), s, grad_query + rows * width, accumulate);
  }

  // ---------------------------------------------------------------------------------------------------- partial sums
  // Where a split sums dQ of its query tiles.
  Sum* grad_query_of(int64_t kv_group, int64_t split, int worker) const {
    const int64_t part = plan_.sums_grad_query() ? kv_group * plan_.splits + split : worker;
    return plan_.grad_query + part * plan_.tiles_of(0) * plan_.tile;
  }

  // Where a split of the rows sums dK and dV of some keys.
  Sum* grad_key_of(int64_t kv_group, int64_t split, Range keys) const {
    return plan_.grad_key + ((kv_group * plan_.splits + split) * p_.key_length + keys.begin) * padded<Sum>(p_.head_dim);
  }
  Sum* grad_value_of(int64_t kv_group, int64_t split, Range keys) const {
    return plan_.grad_value +
           ((kv_group * plan_.splits + split) * p_.key_length + keys.begin) * padded<Sum>(p_.value_dim);
  }

  // sum (+)= part.
  static void add_rows(const Sum* part, int64_t size, bool accumulate, Sum* sum) {
    if (accumulate) return add_row(part, size, sum);
    for (int64_t k = 0; k < size; k += kLanes<Sum>) store(sum + k, load(part + k));
  }

  // Adds the partial sums of all splits, `stride` apart, to the first, in order.
  Sum* sum_splits(Sum* first, int64_t stride, int64_t size) const {
    for (int64_t split = 1; split < plan_.splits; ++split) add_rows(first + split * stride, size, true, first);
    return first;
  }

  // ---------------------------------------------------------------------------------------------------- results
  // Where rows of a result are summed: directly in the output if its layout and dtype match the scratch buffer and no
  // factor remains, otherwise in `scratch`.
  Sum* in_place(const TensorView& to, int64_t batch, int64_t head, int64_t row, int64_t cols, Sum* scratch) const {
    const bool same = one_tile_ && element_size(p_.dtype) == int64_t(sizeof(Sum)) && to.data && to.col_stride == 1 &&
                      to.row_stride == cols;
    return same && cols == padded<Sum>(cols) ? element_ptr<Sum>(p_, to, batch, head) + row * cols : scratch;
  }

  // dK and dV of a key tile.
  void store_key_tile(int64_t kv_group, Range keys, const Sum* grad_key, const Sum* grad_value) const {
    const int64_t batch = kv_group / p_.kv_heads, kv_head = kv_group % p_.kv_heads;
    store_rows(grad_key, padded<Sum>(p_.head_dim), on_store_.scores, p_.grad_key, batch, kv_head, keys, p_.head_dim);
    store_rows(grad_value, padded<Sum>(p_.value_dim), on_store_.weights, p_.grad_value, batch, kv_head, keys,
               p_.value_dim);
  }

  // dQ of a query tile.
  void store_query_tile(const QueryTile& tile, Sum* from, const BackwardScratch<Operand>& s) const {
    const int64_t width = padded<Sum>(p_.head_dim);
    if constexpr (kHasBf16Pairs<Operand>)
      if (s.shared_key.large) add_shared_key(p_, tile, on_product_.scores, s.shared_key, from);
    for (int64_t h = 0; h < tile.heads; ++h)
      store_rows(from + h * count(tile.rows) * width, width, on_store_.scores, p_.grad_query, tile.batch,
                 tile.first_head + h, tile.rows, p_.head_dim);
  }
  void store_zeros(const QueryTile& tile, const BackwardScratch<Operand>& s) const {
    clear_row(s.grad_query, grad_query_size<Operand>(p_, tile_rows(tile)));
    store_query_tile(tile, s.grad_query, s);
  }

  // Rows of a result, unless they were summed in place.
  SCALEDOT_NOINLINE void store_rows(const Sum* from, int64_t width, Sum factor, const TensorView& to, int64_t batch,
                                    int64_t head, Range rows, int64_t cols) const {
    if (!to.data) return;
    with_storage_of<Operand>(p_.dtype, [&]<class Storage>(Type<Storage>) {
      Storage* start = element_ptr<Storage>(p_, to, batch, head) + rows.begin * to.row_stride;
      if (static_cast<const void*>(start) == from) return;
      for (int64_t i = 0; i < count(rows); ++i) narrow_row(from + i * width, factor, cols, start + i * to.row_stride);
    });
  }

  const Problem& p_;
  const BackwardPlan<Operand>& plan_;
  const MaskGradient<Sum>& mask_;
  const QueryTiling tiling_;
  const RowStatistics<Operand> statistics_;
  const ScoreGradients<Operand> gradients_;
  const bool one_tile_;  // there is one key tile
  const Factors on_product_, on_store_;
};

template <class Operand>
void backward_pass(const Problem& p, const Executor& executor) {
  using Sum = SumOf<Operand>;
  Arena arena = {static_cast<char*>(executor.workspace), 0};
  const BackwardPlan<Operand> plan = plan_backward<Operand>(p, executor.workers, arena);
  const MaskGradient<Sum> mask(p, plan.splits, arena);
  const RelativeGradient<Sum> relative(p, plan.splits, arena);
  const CapturedGradients<Sum> captured(p, plan.splits, arena);
  const Backward<Operand> pass(p, plan, mask, relative, captured);
  const int64_t kv_groups = p.batch * p.kv_heads, tiles = plan.query_tiles;
  if (!plan.whole_rows)
    parallel(executor, kv_groups * tiles,
             [&](int64_t task, int worker) { pass.prepare_rows(task / tiles, task % tiles, worker); });
  if (plan.separate_grad_query) {
    const int64_t splits = plan.sums_grad_key() ? plan.splits : 1, tasks = kv_groups * plan.key_tiles * splits;
    if (p.grad_key.data || p.grad_value.data)
      parallel(executor, tasks, [&](int64_t task, int worker) {
        pass.add_key_tile_separately(task % kv_groups, task / kv_groups / splits, task / kv_groups % splits, worker);
      });
    const QueryTiling tiling = query_tiling_for_workers(p, executor.workers);
    if (p.grad_query.data)
      parallel(executor, kv_groups * tiles_per_head(tiling), [&](int64_t task, int worker) {
        pass.add_query_tile_separately(tiling, task % kv_groups, task / kv_groups, worker);
      });
  } else {
    if (mask.wanted()) mask.clear(executor);
    if (relative.wanted()) relative.clear(executor);
    if (captured.wanted()) captured.clear(executor);
    // The first splits of a causal KV group take longest, so they come first. One worker takes the splits of a KV group
    // in turn, while its rows are cached.
    const bool in_turn = executor.workers == 1;
    parallel(executor, plan.classes * plan.splits, [&](int64_t task, int worker) {
      if (in_turn)
        pass.add_split(task / plan.splits, task % plan.splits, worker, executor.workers);
      else
        pass.add_split(task % plan.classes, task / plan.classes, worker, executor.workers);
    });
  }
  if (plan.sums_grad_key() && (p.grad_key.data || p.grad_value.data))
    parallel(executor, kv_groups * plan.key_tiles,
             [&](int64_t task, int) { pass.sum_grad_key(task % kv_groups, task / kv_groups); });
  if (plan.sums_grad_query() && !plan.separate_grad_query && p.grad_query.data)
    parallel(executor, kv_groups * tiles,
             [&](int64_t task, int worker) { pass.sum_grad_query(task / tiles, task % tiles, worker); });
  if (mask.wanted()) mask.finish(executor);
  if (relative.wanted()) relative.finish(executor);
  if (captured.wanted()) captured.finish(executor);
}

}  // namespace
}  // namespace scaledot
