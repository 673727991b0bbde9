// The backward pass, once, for every instruction set and storage type. Nothing of size (query_length, key_length) is kept:
// the weights are recomputed from lse.
//
//   delta_i = sum_d dO_id O_id + sum_j dW_ij W_ij - dlse_i                      (W: the returned weights, if any)
//   for each tile of keys, for each tile of rows that sees it:
//     S  = scores(Q K^T)          P  = exp(S - lse)           Pd = keep P / (1 - dropout_p)      (see RowShift about lse)
//     dP = keep (dO V^T + dW) / (1 - dropout_p)
//     dS = P (dP - delta)         dX = scale * slope * dS     (slope: of the softcap; 0 where the mask replaced the score)
//     dV += Pd^T dO               dK += dX^T Q                dQ += dX K            dMask = dS
// Dao et al., "FlashAttention", 2022, appendix B.
//
// A task is a run of key tiles of one (batch, kv_head) plane: it owns its dK and dV. It adds its part of dQ to a slab of its
// own; the slabs are summed in order. How many there are depends on the shape alone, so results do not depend on threads.
#pragma once

#include "cpu/simd/forward.h"

namespace scaledot {
namespace {

constexpr int64_t kWantedTasks = 16;                // cut planes into slabs until there are this many tasks ...
constexpr int64_t kSlabBudget = int64_t(48) << 20;  // ... as far as the slabs of dQ fit in this many bytes

// What turns a score into its probability: P = exp(s - offset - log_sum). Usually offset is lse and log_sum 0, which costs half
// a unit in the last place of lse. Where that is too much (see prepare_rows; worst is a row whose keys are all masked_fill(-1e9):
// -1e9 + log 8 is -1e9) the forward's maximum and sum are computed again.
template <class T>
struct RowShift {
  T offset;
  T log_sum;
};
constexpr double kPlainLse =
    16;  // up to here lse has the precision that float32 weights need; log(keys) alone stays below it

template <class T>
struct BackwardScratch {
  // Of the key tile.
  Panels<T> key_columns;    // K^T
  Panels<T> value_columns;  // V^T
  Panels<T> keys;           // K
  T* grad_key;              // (kTileKeys, head_dim padded)
  T* grad_value;            // (kTileKeys, value_dim padded)
  // Of the row tile.
  T* query;           // strips
  T* grad_output;     // strips
  Panels<T> queries;  // the same as B operands
  Panels<T> grad_outputs;
  // Of the tile of scores, (kTileRows, kTileKeys) each.
  T* weights;    // S, then Pd
  T* grads;      // dP, then dX
  T* mask_sums;  // of a broadcast mask's gradient
  // One row.
  T* row;
  T* grad_weights;
  T* grad_scores;
  RowScratch<T> terms;
};

template <class T>
Panels<T> take_panels(Arena& arena, int64_t depth, int64_t cols) {
  return {take<T>(arena, round_up(cols, kPanel<T>) * depth), depth * kPanel<T>, true};
}

template <class T>
BackwardScratch<T> lay_out_backward(const Problem& p, Arena& arena) {
  BackwardScratch<T> s;
  s.key_columns = take_panels<T>(arena, p.head_dim, kTileKeys);
  s.value_columns = take_panels<T>(arena, p.value_dim, kTileKeys);
  s.keys = take_panels<T>(arena, kTileKeys, p.head_dim);
  s.grad_key = take<T>(arena, kTileKeys * padded<T>(p.head_dim));
  s.grad_value = take<T>(arena, kTileKeys * padded<T>(p.value_dim));
  s.query = take<T>(arena, kTileRows * p.head_dim);
  s.grad_output = take<T>(arena, kTileRows * p.value_dim);
  s.queries = take_panels<T>(arena, kTileRows, p.head_dim);
  s.grad_outputs = take_panels<T>(arena, kTileRows, p.value_dim);
  s.weights = take<T>(arena, kTileRows * kTileKeys);
  s.grads = take<T>(arena, kTileRows * kTileKeys);
  s.mask_sums = take<T>(arena, p.grad_mask.data ? kTileRows * kTileKeys : 0);
  s.row = take<T>(arena, padded<T>(larger(p.head_dim, p.value_dim)));
  s.grad_weights = take<T>(arena, kTileKeys);
  s.grad_scores = take<T>(arena, kTileKeys);
  s.terms = lay_out_row<T>(arena);
  return s;
}

template <class T>
struct BackwardPlan {
  int64_t key_tiles;
  int64_t slabs;       // tasks per plane
  int64_t slab;        // numbers in a slab: dQ of a plane's heads, rows padded
  T* delta;            // (batch, heads, query_length)
  RowShift<T>* shift;  // the same
  T* grad_query;       // (plane, slab) slabs, or one for each worker if slabs is 1
  char* scratch;       // of worker 0
  int64_t scratch_bytes;
};

template <class T>
BackwardPlan<T> plan_backward(const Problem& p, int workers, Arena& arena) {
  const int64_t planes = p.batch * p.kv_heads, group = p.heads / p.kv_heads;
  BackwardPlan<T> plan = {};
  plan.key_tiles = ceil_div(p.key_length, kTileKeys);
  plan.slab = group * p.query_length * padded<T>(p.head_dim);
  const int64_t affordable = kSlabBudget / larger<int64_t>(planes * plan.slab * int64_t(sizeof(T)), 1);
  const int64_t wanted = smaller(ceil_div(kWantedTasks, larger<int64_t>(planes, 1)), plan.key_tiles);
  plan.slabs = larger<int64_t>(smaller(wanted, affordable), 1);
  plan.delta = take<T>(arena, p.batch * p.heads * p.query_length);
  plan.shift = take<RowShift<T>>(arena, p.batch * p.heads * p.query_length);
  plan.grad_query = take<T>(arena, plan.slab * (plan.slabs == 1 ? workers : planes * plan.slabs));
  plan.scratch = take<char>(arena, 0);
  const int64_t start = arena.used;
  lay_out_backward<T>(p, arena);
  plan.scratch_bytes = arena.used - start;
  arena.used = start + workers * plan.scratch_bytes;
  return plan;
}

// Whether every element of grad_mask belongs to one (batch, head, row, column) only, so that tiles can write it directly.
inline bool owns_mask(const Problem& p) {
  const TensorView& m = p.grad_mask;
  bool owns =
      (m.head_stride || p.heads == 1) && (m.row_stride || p.query_length == 1) && (m.col_stride || p.key_length == 1);
  for (int d = 0; d < p.batch_dims; ++d) owns &= m.batch_stride[d] || p.batch_sizes[d] == 1;
  return owns;
}

// One row of dMask, in the mask's own dtype.
template <class T>
void store_mask_row(const TensorView& view, int64_t start, int64_t cols, const T* from) {
  if (view.col_stride == 1 && view.dtype != DType::float64 && sizeof(T) == 4) {
    with_storage(view.dtype, [&](auto type) {
      using Storage = typename decltype(type)::type;
      if constexpr (sizeof(Storage) <= 4 && sizeof(T) == 4)
        narrow_row(from, T(1), cols, static_cast<Storage*>(view.data) + start);
    });
    return;
  }
  for (int64_t k = 0; k < cols; ++k) store_element(view.data, view.dtype, start + k * view.col_stride, from[k]);
}

template <class Storage, class T>
class Backward {
 public:
  Backward(const Problem& p, const BackwardPlan<T>& plan)
      : p_(p), plan_(plan), tiling_(tile_problem(p)), mask_direct_(p.grad_mask.data && owns_mask(p)) {}

  bool mask_direct() const { return mask_direct_; }

  // delta and shift of a tile's rows.
  void prepare_rows(int64_t plane, int64_t index, int worker) const {
    const RowTile tile = row_tile(p_, tiling_, plane, index);
    // float64 is asked for its precision; and over few rows lse's rounding errors, one to a row, do not average out.
    bool plain = sizeof(T) == sizeof(float) && tiles_per_plane(tiling_) > 1;
    for (int64_t r = 0; r < tile_rows(tile); ++r) {
      const int64_t head = head_of(tile, r), i = row_of(tile, r);
      const T lse = shift(at<T>(p_, p_.lse, tile.batch, head)[i * p_.lse.row_stride]);
      plan_.delta[row_index(tile, r)] = delta(tile.batch, head, i);
      plan_.shift[row_index(tile, r)] = {lse, T(0)};
      plain &= !(lse > T(kPlainLse) || lse < T(-kPlainLse));
    }
    if (!plain) recompute_shifts(tile, worker);
  }

  // dK, dV of a run of key tiles, and its slab of dQ.
  void run(int64_t plane, int64_t slab, int worker) const {
    BackwardScratch<T> s = scratch(worker);
    T* grad_query = plan_.grad_query + (plan_.slabs == 1 ? worker : plane * plan_.slabs + slab) * plan_.slab;
    for (int64_t k = 0; k < plan_.slab; ++k) grad_query[k] = T(0);
    const int64_t first = plan_.key_tiles * slab / plan_.slabs, last = plan_.key_tiles * (slab + 1) / plan_.slabs;
    for (int64_t t = first; t < last; ++t) run_key_tile(plane, key_tile(p_, t), grad_query, s);
    if (plan_.slabs == 1) store_grad_query(plane, grad_query);
  }

  // dQ of a plane's rows [begin, end) (of all its heads, stacked): the slabs, summed in order.
  void sum_slabs(int64_t plane, Range rows) const {
    const int64_t width = padded<T>(p_.head_dim);
    T* sum = plan_.grad_query + plane * plan_.slabs * plan_.slab;
    for (int64_t slab = 1; slab < plan_.slabs; ++slab)
      for (int64_t k = rows.begin * width; k < rows.end * width; k += kLanes<T>)
        store(sum + k, load(sum + k) + load(sum + slab * plan_.slab + k));
    store_grad_query_rows(plane, sum, rows);
  }

  // dMask of one tile of the mask's own elements, summed over everything the mask is broadcast along.
  void run_mask_tile(int64_t target_batch, int64_t target_head, int64_t row_index, int64_t key_index,
                     int worker) const {
    BackwardScratch<T> s = scratch(worker);
    const TensorView& mask = p_.grad_mask;
    const bool all_rows = !mask.row_stride, all_keys = !mask.col_stride;
    T* sums = s.mask_sums;
    const int64_t target = offset(p_, mask, target_batch, target_head);
    for (int64_t k = 0; k < kTileRows * kTileKeys; ++k) sums[k] = T(0);
    const auto tile_of_rows = [&](int64_t r) -> Range {
      return {r * tiling_.rows, smaller((r + 1) * tiling_.rows, p_.query_length)};
    };
    for (int64_t batch = 0; batch < p_.batch; ++batch)
      for (int64_t head = 0; head < p_.heads; ++head) {
        if (offset(p_, mask, batch, head) != target) continue;
        for (int64_t r = all_rows ? 0 : row_index; r < (all_rows ? tiling_.row_tiles : row_index + 1); ++r)
          for (int64_t t = all_keys ? 0 : key_index; t < (all_keys ? plan_.key_tiles : key_index + 1); ++t)
            add_mask_tile(batch, head, tile_of_rows(r), key_tile(p_, t), all_rows, all_keys, s, sums);
      }
    const Range rows = tile_of_rows(row_index),
                keys = key_tile(p_, key_index);  // indices are 0 where sums are over all
    const int64_t height = all_rows ? 1 : count(rows), width = all_keys ? 1 : count(keys);
    for (int64_t r = 0; r < height; ++r)
      store_mask_row(mask, target + (rows.begin + r) * mask.row_stride + keys.begin * mask.col_stride, width,
                     sums + r * kTileKeys);
  }

 private:
  BackwardScratch<T> scratch(int worker) const {
    Arena arena = {plan_.scratch + worker * plan_.scratch_bytes, 0};
    return lay_out_backward<T>(p_, arena);
  }

  int64_t row_index(const RowTile& tile, int64_t r) const {
    return (tile.batch * p_.heads + head_of(tile, r)) * p_.query_length + row_of(tile, r);
  }

  T delta(int64_t batch, int64_t head, int64_t i) const {
    const Block<Storage> output = block<Storage>(p_, p_.output, batch, head, 0);
    const Block<Storage> grad = block<Storage>(p_, p_.grad_output, batch, head, 0);
    const Block<Storage> weights = block<Storage>(p_, p_.weights, batch, head, 0);
    const Block<Storage> grad_weights = block<Storage>(p_, p_.grad_weights, batch, head, 0);
    const T* grad_lse = at<T>(p_, p_.grad_lse, batch, head);
    T sum = grad.data ? dot(output, grad, i, p_.value_dim) : T(0);
    if (grad_weights.data) sum += dot(weights, grad_weights, i, p_.key_length);
    return grad_lse ? sum - grad_lse[i * p_.grad_lse.row_stride] : sum;
  }

  // Maximum and sum of the tile's rows, as the forward computed them.
  void recompute_shifts(const RowTile& tile, int worker) const {
    BackwardScratch<T> s = scratch(worker);
    RowState<T> state[kTileRows];
    for (RowState<T>& row : state) row = empty_row<T>();
    load_row_tile(tile, s);
    const Range range = key_range(p_, tile.rows);
    for (int64_t t = range.begin / kTileKeys; t * kTileKeys < range.end; ++t) {
      const Range keys = key_tile(p_, t);
      const TileTerms terms = tile_terms<T>(p_, tile_kind(p_, tile.rows, keys), keys);
      load_key_tile(tile.batch, tile.kv_head, keys, s);
      multiply<Layout::strips>(tile_rows(tile), count(keys), p_.head_dim, s.query, s.key_columns, s.weights, kTileKeys,
                               false);
      for (int64_t r = 0; r < tile_rows(tile); ++r) {
        T* row = s.weights + r * kTileKeys;
        load_terms(p_, tile, r, keys, terms, s.terms);
        raise_maximum<T>(state[r], finish_scores(p_, terms, s.terms, count(keys), row), nullptr, 0);
        state[r].sum += exponentiate(terms, s.terms, shift(state[r].maximum), count(keys), row);
      }
    }
    for (int64_t r = 0; r < tile_rows(tile); ++r)
      plan_.shift[row_index(tile, r)] = {shift(state[r].maximum), state[r].sum == T(0) ? T(0) : log(state[r].sum)};
  }

  static T dot(const Block<Storage>& a, const Block<Storage>& b, int64_t i, int64_t cols) {
    const Storage* x = a.data + i * a.row_stride;
    const Storage* y = b.data + i * b.row_stride;
    Vec<T> sums(T(0));
    int64_t d = 0;
    if (a.col_stride == 1 && b.col_stride == 1)
      for (; d + kLanes<T> <= cols; d += kLanes<T>) sums = multiply_add(widen_load(x + d), widen_load(y + d), sums);
    T sum = sum_of(sums);
    for (; d < cols; ++d) sum += T(widen(x[d * a.col_stride])) * T(widen(y[d * b.col_stride]));
    return sum;
  }

  void load_key_tile(int64_t batch, int64_t kv_head, Range keys, BackwardScratch<T>& s) const {
    const Block<Storage> key = block<Storage>(p_, p_.key, batch, kv_head, keys.begin);
    const Block<Storage> value = block<Storage>(p_, p_.value, batch, kv_head, keys.begin);
    pack_panels_transposed(key, count(keys), p_.head_dim, s.row, s.key_columns);
    pack_panels_transposed(value, count(keys), p_.value_dim, s.row, s.value_columns);
    pack_panels(key, count(keys), p_.head_dim, s.row, s.keys);
  }

  void load_row_tile(const RowTile& tile, BackwardScratch<T>& s) const {
    bool queries_finite = true, grads_finite = true;
    for (int64_t h = 0; h < tile.heads; ++h) {
      const int64_t rows = count(tile.rows), start = h * rows;
      const Block<Storage> query = block<Storage>(p_, p_.query, tile.batch, tile.first_head + h, tile.rows.begin);
      pack_strips(query, start, rows, tile_rows(tile), p_.head_dim, s.row, s.query);
      Panels<T> queries = {s.queries.data + start * kPanel<T>, s.queries.stride, true};
      pack_panels(query, rows, p_.head_dim, s.row, queries);
      queries_finite &= queries.finite;
      if (!p_.grad_output.data) continue;
      const Block<Storage> grad = block<Storage>(p_, p_.grad_output, tile.batch, tile.first_head + h, tile.rows.begin);
      pack_strips(grad, start, rows, tile_rows(tile), p_.value_dim, s.row, s.grad_output);
      Panels<T> grads = {s.grad_outputs.data + start * kPanel<T>, s.grad_outputs.stride, true};
      pack_panels(grad, rows, p_.value_dim, s.row, grads);
      grads_finite &= grads.finite;
    }
    s.queries.finite = queries_finite;
    s.grad_outputs.finite = grads_finite;
  }

  // S and dP, then row by row Pd and dX (or dS, if `only_scores`).
  void score_gradients(const RowTile& tile, Range keys, TileKind kind, bool only_scores,
                       const BackwardScratch<T>& s) const {
    const int64_t rows = tile_rows(tile);
    const TileTerms terms = tile_terms<T>(p_, kind, keys);
    multiply<Layout::strips>(rows, count(keys), p_.head_dim, s.query, s.key_columns, s.weights, kTileKeys, false);
    if (p_.grad_output.data)
      multiply<Layout::strips>(rows, count(keys), p_.value_dim, s.grad_output, s.value_columns, s.grads, kTileKeys,
                               false);
    else
      for (int64_t k = 0; k < rows * kTileKeys; ++k) s.grads[k] = T(0);
    for (int64_t r = 0; r < rows; ++r) {
      load_terms(p_, tile, r, keys, terms, s.terms);
      if (p_.dropout_p > 0) load_keep(p_, tile, r, keys, s.terms);
      if (p_.grad_weights.data) {
        const Block<Storage> grad = block<Storage>(p_, p_.grad_weights, tile.batch, head_of(tile, r), row_of(tile, r));
        widen_row(grad.data + keys.begin * grad.col_stride, grad.col_stride, count(keys), s.grad_weights);
      }
      row_gradients(tile, r, keys, terms, only_scores, s);
    }
  }

  void row_gradients(const RowTile& tile, int64_t r, Range keys, const TileTerms& terms, bool only_scores,
                     const BackwardScratch<T>& s) const {
    const RowShift<T> shift = plan_.shift[row_index(tile, r)];
    const Vec<T> base(shift.offset), log_sum(shift.log_sum), delta(plan_.delta[row_index(tile, r)]);
    const Vec<T> scale(T(p_.scale)), kept(T(1.0 / (1.0 - p_.dropout_p)));
    const Vec<T> zero(T(0)), skip(kSkip<T>);
    T* weights = s.weights + r * kTileKeys;
    T* grads = s.grads + r * kTileKeys;
    for (int64_t k = 0; k < count(keys); k += kLanes<T>) {
      Vec<T> slope;
      const Vec<T> score_k = score(p_, terms, s.terms, k, load(weights + k), &slope);
      const Vec<T> p = weight(score_k, base, log_sum);
      Vec<T> dp = load(grads + k), pd = p;
      if (p_.grad_weights.data) dp = dp + load(s.grad_weights + k);
      if (p_.dropout_p > 0) {
        const Mask<T> keep = bytes_equal<T>(s.terms.keep + k, 1);
        dp = select(keep, dp * kept, zero);
        pd = select(keep, p * kept, zero);
      }
      Vec<T> ds = p * (dp - delta);
      pd = without_masked(terms, s.terms, k, pd);
      ds = without_masked(terms, s.terms, k, ds);
      store(weights + k, pd);
      store(s.grad_scores + k, ds);
      Vec<T> dx = multiply_add(ds * slope, scale, zero);  // + 0: a live -0 must not pass for kSkip
      if (terms.states) dx = select(bytes_equal<T>(s.terms.state + k, kLive), dx, skip);
      store(grads + k, only_scores ? ds : dx);
    }
    if (mask_direct_ && !only_scores)
      store_mask_row(p_.grad_mask,
                     offset(p_, p_.grad_mask, tile.batch, head_of(tile, r)) +
                         row_of(tile, r) * p_.grad_mask.row_stride + keys.begin * p_.grad_mask.col_stride,
                     count(keys), s.grad_scores);
  }

  void run_key_tile(int64_t plane, Range keys, T* grad_query, BackwardScratch<T>& s) const {
    const int64_t batch = plane / p_.kv_heads, kv_head = plane % p_.kv_heads, group = p_.heads / p_.kv_heads;
    const int64_t key_width = padded<T>(p_.head_dim), value_width = padded<T>(p_.value_dim);
    load_key_tile(batch, kv_head, keys, s);
    for (int64_t k = 0; k < kTileKeys * key_width; ++k) s.grad_key[k] = T(0);
    for (int64_t k = 0; k < kTileKeys * value_width; ++k) s.grad_value[k] = T(0);
    for (int64_t index = 0; index < tiles_per_plane(tiling_); ++index) {
      const RowTile tile = row_tile(p_, tiling_, plane, index);
      const TileKind kind = tile_kind(p_, tile.rows, keys);
      if (kind == TileKind::skip || excluded(p_, tile, keys)) continue;
      const int64_t rows = tile_rows(tile);
      load_row_tile(tile, s);
      score_gradients(tile, keys, kind, false, s);
      if (p_.grad_value.data && p_.grad_output.data)
        multiply<Layout::columns>(count(keys), p_.value_dim, rows, s.weights, s.grad_outputs, s.grad_value, value_width,
                                  true);
      if (p_.grad_key.data)
        multiply<Layout::columns>(count(keys), p_.head_dim, rows, s.grads, s.queries, s.grad_key, key_width, true);
      if (p_.grad_query.data) {
        const int64_t start = (tile.first_head - kv_head * group) * p_.query_length + tile.rows.begin;
        multiply<Layout::rows>(rows, p_.head_dim, count(keys), s.grads, s.keys, grad_query + start * key_width,
                               key_width, true);
      }
    }
    store_rows(s.grad_key, key_width, p_.grad_key, batch, kv_head, keys, p_.head_dim);
    store_rows(s.grad_value, value_width, p_.grad_value, batch, kv_head, keys, p_.value_dim);
  }

  void store_rows(const T* from, int64_t width, const TensorView& to, int64_t batch, int64_t head, Range rows,
                  int64_t cols) const {
    if (!to.data) return;
    for (int64_t i = rows.begin; i < rows.end; ++i)
      narrow_row(from + (i - rows.begin) * width, T(1), cols, at<Storage>(p_, to, batch, head) + i * to.row_stride);
  }

  void store_grad_query(int64_t plane, const T* from) const {
    store_grad_query_rows(plane, from, {0, p_.heads / p_.kv_heads * p_.query_length});
  }
  void store_grad_query_rows(int64_t plane, const T* from, Range rows) const {
    if (!p_.grad_query.data) return;
    const int64_t batch = plane / p_.kv_heads, first_head = plane % p_.kv_heads * (p_.heads / p_.kv_heads);
    for (int64_t r = rows.begin; r < rows.end; ++r)
      narrow_row(from + r * padded<T>(p_.head_dim), T(1), p_.head_dim,
                 at<Storage>(p_, p_.grad_query, batch, first_head + r / p_.query_length) +
                     r % p_.query_length * p_.grad_query.row_stride);
  }

  void add_mask_tile(int64_t batch, int64_t head, Range rows, Range keys, bool all_rows, bool all_keys,
                     BackwardScratch<T>& s, T* sums) const {
    const RowTile tile = {batch, head / (p_.heads / p_.kv_heads), head, 1, rows};
    const TileKind kind = tile_kind(p_, rows, keys);
    if (kind == TileKind::skip) return;
    load_key_tile(batch, tile.kv_head, keys, s);
    load_row_tile(tile, s);
    score_gradients(tile, keys, kind, true, s);
    for (int64_t r = 0; r < count(rows); ++r)
      for (int64_t k = 0; k < count(keys); ++k)
        sums[(all_rows ? 0 : r * kTileKeys) + (all_keys ? 0 : k)] += s.grads[r * kTileKeys + k];
  }

  const Problem& p_;
  const BackwardPlan<T>& plan_;
  const Tiling tiling_;
  const bool mask_direct_;
};

// The number of different positions of grad_mask along (batch dims, heads), and the batch of each: broadcast ones count once.
inline int64_t mask_batches(const Problem& p) {
  int64_t batches = 1;
  for (int d = 0; d < p.batch_dims; ++d) batches *= p.grad_mask.batch_stride[d] ? p.batch_sizes[d] : 1;
  return batches;
}
inline int64_t mask_batch(const Problem& p, int64_t index) {
  int64_t batch = 0, step = 1;
  for (int d = p.batch_dims - 1; d >= 0; --d) {
    if (p.grad_mask.batch_stride[d]) {
      batch += index % p.batch_sizes[d] * step;
      index /= p.batch_sizes[d];
    }
    step *= p.batch_sizes[d];
  }
  return batch;
}

template <class Storage, class T>
void run_mask_gradient(const Problem& p, const Backward<Storage, T>& pass, int64_t key_tiles,
                       const Executor& executor) {
  const TensorView& m = p.grad_mask;
  const int64_t heads = m.head_stride ? p.heads : 1, rows = m.row_stride ? tile_problem(p).row_tiles : 1;
  const int64_t keys = m.col_stride ? key_tiles : 1;
  parallel(executor, mask_batches(p) * heads * rows * keys, [&](int64_t task, int worker) {
    const int64_t plane = task / (rows * keys), within = task % (rows * keys);
    pass.run_mask_tile(mask_batch(p, plane / heads), plane % heads, within / keys, within % keys, worker);
  });
}

// Tiles that the position mask skips are never visited: their dMask is 0.
inline void clear_mask_gradient(const Problem& p, const Executor& executor) {
  const TensorView& m = p.grad_mask;
  parallel(executor, p.batch * p.heads, [&](int64_t task, int) {
    const int64_t start = offset(p, m, task / p.heads, task % p.heads);
    for (int64_t i = 0; i < p.query_length; ++i)
      for (int64_t j = 0; j < p.key_length; ++j)
        store_element(m.data, m.dtype, start + i * m.row_stride + j * m.col_stride, 0.0f);
  });
}

template <class Storage>
void run_backward(const Problem& p, const Executor& executor) {
  using T = typename Compute<Storage>::type;
  Arena arena = {static_cast<char*>(executor.workspace), 0};
  const BackwardPlan<T> plan = plan_backward<T>(p, executor.workers, arena);
  const Backward<Storage, T> pass(p, plan);
  const int64_t planes = p.batch * p.kv_heads;
  const int64_t tiles = tiles_per_plane(tile_problem(p));
  parallel(executor, planes * tiles,
           [&](int64_t task, int worker) { pass.prepare_rows(task / tiles, task % tiles, worker); });
  if (pass.mask_direct()) clear_mask_gradient(p, executor);
  if (p.grad_query.data || p.grad_key.data || p.grad_value.data || pass.mask_direct())
    parallel(executor, planes * plan.slabs,
             [&](int64_t task, int worker) { pass.run(task % planes, task / planes, worker); });
  if (plan.slabs > 1 && p.grad_query.data) {
    const int64_t rows = p.heads / p.kv_heads * p.query_length, step = 8 * kTileRows, steps = ceil_div(rows, step);
    parallel(executor, planes * steps, [&](int64_t task, int) {
      const int64_t begin = task % steps * step;
      pass.sum_slabs(task / steps, {begin, smaller(begin + step, rows)});
    });
  }
  if (p.grad_mask.data && !pass.mask_direct()) run_mask_gradient(p, pass, plan.key_tiles, executor);
}

}  // namespace
}  // namespace scaledot
