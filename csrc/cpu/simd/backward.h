// The backward pass, once, for every instruction set, storage type and operand type. Nothing of size (query_length, key_length) is
// kept: the weights are recomputed from lse.
//
//   delta_i = sum_d dO_id O_id + sum_j dW_ij W_ij - dlse_i                      (W: the returned weights, if any)
//   for each tile of keys, for each tile of rows that sees it:
//     S  = scores(Q K^T)          P  = exp(S - lse)           Pd = keep P            (see RowShift about lse)
//     dP = keep (dO V^T + dW) / (1 - dropout_p)
//     dS = P (dP - delta)         dX = slope dS               (slope: of the softcap; 0 where the mask replaced the score)
//     dV += Pd^T dO               dK += dX^T Q                dQ += dX K             dMask += dS
//   dV /= 1 - dropout_p           dK *= scale                 dQ *= scale
// Dao et al., "FlashAttention", 2022, appendix B.
//
// A task is a run of key tiles of one (batch, kv_head) plane, or of all planes that share a mask which gets a gradient: it owns its dK
// and dV. It adds its part of dQ to a slab of its own; the slabs are summed in order. How many there are depends on the shape alone.
// Where all keys that a row sees are in one tile, its sum and delta are taken from the tile of scores itself, which is more exact than lse
// and output: under a causal mask the first rows have the largest gradients, and of few weights the rounding errors do not average out.
// Where there is but one tile of keys, dQ is complete with the first product: nothing is prepared and there are no slabs.
// With more threads than such tasks, each key tile is a task for dK and dV, and each row tile one for dQ, which costs S and dP a second
// time. Row tiles then sum dQ in the order that slabs would have: the results are the same, bit for bit.
#pragma once

#include "cpu/simd/backward_plan.h"

namespace scaledot {
namespace {

template <class Storage, class E>
class Backward {
  using T = SumOf<E>;
  static constexpr int kGroup = kNumbers<E>;  // rows whose gradients are computed together

 public:
  Backward(const Problem& p, const BackwardPlan<E>& plan, const MaskGradient<T>& mask)
      : p_(p),
        plan_(plan),
        mask_(mask),
        tiling_(tile_problem(p, Cut::even)),
        unit_(unit_of<T>(p)),
        one_tile_(plan.key_tiles == 1),
        products_(one_tile_ ? factors(p) : Factors{1, 1}),
        stores_(one_tile_ ? Factors{1, 1} : factors(p)) {}

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
    if (!plain && !p_.part.given) recompute_shifts(tile, worker);  // not all keys are in a part
  }

  // dK, dV of a run of key tiles of all planes of a class, their part of the mask's gradient, and its slabs of dQ.
  void run(int64_t gradient_class, int64_t slab, int worker) const {
    BackwardScratch<E> s = scratch(worker);
    const int64_t first = plan_.key_tiles * slab / plan_.slabs, last = plan_.key_tiles * (slab + 1) / plan_.slabs;
    for_each_plane(p_, gradient_class, [&](int64_t plane) {
      T* grad_query = plan_.grad_query + (plan_.slabs == 1 ? worker : plane * plan_.slabs + slab) * plan_.slab;
      if (!one_tile_) clear_row(grad_query, plan_.slab);
      for (int64_t t = first; t < last; ++t) run_key_tile(plane, t, slab, grad_query, s);
      if (plan_.slabs == 1 && !one_tile_)
        store_grad_query(plane, grad_query, {0, p_.heads / p_.kv_heads * p_.query_length});
    });
    mask_.end_task();
  }

  // dK and dV of one key tile alone.
  void run_keys(int64_t plane, int64_t t, int worker) const {
    BackwardScratch<E> s = scratch(worker);
    run_key_tile(plane, t, 0, nullptr, s);
  }

  // dQ of one row tile alone.
  void run_rows(const Tiling& tiling, int64_t plane, int64_t index, int worker) const {
    BackwardScratch<E> s = scratch(worker);
    const RowTile tile = row_tile(p_, tiling, plane, index);
    const int64_t width = padded<T>(p_.head_dim), size = tile_rows(tile) * width;
    for (int64_t slab = 0; slab < plan_.slabs; ++slab) {
      T* sum = slab == 0 ? s.grad_query : s.grad_query_part;
      clear_row(sum, size);
      const int64_t first = plan_.key_tiles * slab / plan_.slabs, last = plan_.key_tiles * (slab + 1) / plan_.slabs;
      for (int64_t t = first; t < last; ++t) {
        const Range all = key_tile(p_, t), keys = seen_keys(p_, tile, all);
        const TileKind kind = tile_kind(p_, tile.rows, keys);
        if (kind == TileKind::skip || excluded(p_, tile, keys)) continue;
        load_key_tile(tile.batch, tile.kv_head, all, s);
        load_row_tile(tile, s);
        score_gradients(tile, keys, keys.begin - all.begin, kind, slab, s);
        add_grad_query(tile, keys, keys.begin - all.begin, sum, true, s);
      }
      for (int64_t k = 0; k < size && slab > 0; k += kLanes<T>)
        store(s.grad_query + k, load(s.grad_query + k) + load(s.grad_query_part + k));
    }
    store_row_tile(tile, s.grad_query);
  }

  // dQ of a plane's rows [begin, end) (of all its heads, stacked): the slabs, summed in order.
  void sum_slabs(int64_t plane, Range rows) const {
    const int64_t width = padded<T>(p_.head_dim);
    T* sum = plan_.grad_query + plane * plan_.slabs * plan_.slab;
    for (int64_t slab = 1; slab < plan_.slabs; ++slab)
      for (int64_t k = rows.begin * width; k < rows.end * width; k += kLanes<T>)
        store(sum + k, load(sum + k) + load(sum + slab * plan_.slab + k));
    store_grad_query(plane, sum, rows);
  }

 private:
  // What remains to be multiplied with: where a result is the sum of few products, by these, otherwise when it is stored.
  struct Factors {
    T scores;   // dQ, dK
    T weights;  // dV
  };
  static Factors factors(const Problem& p) { return {T(p.scale), T(1.0 / (1.0 - p.dropout_p))}; }

  BackwardScratch<E> scratch(int worker) const {
    Arena arena = {plan_.scratch + worker * plan_.scratch_bytes, 0};
    return lay_out_backward<E>(p_, arena);
  }

  int64_t row_index(const RowTile& tile, int64_t r) const {
    return (tile.batch * p_.heads + head_of(tile, r)) * p_.query_length + row_of(tile, r);
  }

  T delta(int64_t batch, int64_t head, int64_t i) const {
    const Block<Storage> output = block<Storage>(p_, p_.output, batch, head, i);
    const Block<Storage> grad = block<Storage>(p_, p_.grad_output, batch, head, i);
    const Block<Storage> weights = block<Storage>(p_, p_.weights, batch, head, i);
    const Block<Storage> grad_weights = block<Storage>(p_, p_.grad_weights, batch, head, i);
    const T* grad_lse = at<T>(p_, p_.grad_lse, batch, head);
    T sum = grad.data ? dot(output, grad, p_.value_dim) : T(0);
    if (grad_weights.data) sum += dot(weights, grad_weights, p_.key_length);
    return grad_lse ? sum - grad_lse[i * p_.grad_lse.row_stride] : sum;
  }

  // The dot product of the first rows of two blocks.
  static T dot(const Block<Storage>& a, const Block<Storage>& b, int64_t cols) {
    Vec<T> sums(T(0));
    int64_t d = 0;
    if (a.col_stride == 1 && b.col_stride == 1)
      for (; d + kLanes<T> <= cols; d += kLanes<T>)
        sums = multiply_add(widen_load(a.data + d), widen_load(b.data + d), sums);
    T sum = sum_of(sums);
    for (; d < cols; ++d) sum += T(widen(a.data[d * a.col_stride])) * T(widen(b.data[d * b.col_stride]));
    return sum;
  }

  // P without its sum: exp2 of this is exp(s - offset).
  Vec<T> exponent(Vec<T> s, Vec<T> offset, Vec<T> log2_sum) const {
    const Vec<T> difference = multiply_add(s, Vec<T>(unit_.natural), Vec<T>(T(0)) - offset);
    return multiply_add(difference, Vec<T>(T(kLog2e)), Vec<T>(T(0)) - log2_sum);
  }

  // A row all of whose keys are here: its scores become exp(s - offset), its gradients dP, and from these very numbers come what the
  // former sum up to, inverted, and delta.
  struct WholeRow {
    T inverse_sum, delta;
  };
  template <bool kGeneral, bool kDropout>
  WholeRow whole_row(const GroupTerms<E>& group, int g, Range seen, Vec<T> offset, T* scores, T* grads, T delta) const {
    const Vec<T> zero(T(0)), kept(T(1.0 / (1.0 - p_.dropout_p)));
    Vec<T> sum = zero, product = zero;
    for (int64_t k = seen.begin; k < seen.end; k += kLanes<T>) {
      const Vec<T> score = load(scores + k), p = exp2(exponent(score, offset, zero));
      Vec<T> dp = load(grads + k);
      if (kGeneral && p_.grad_weights.data) dp = dp + load(group.grad_weights + g * kTileKeys + k);
      if constexpr (kDropout) dp = select(kept_lanes(group.row[g], k), dp * kept, zero);
      dp = select(score == Vec<T>(-T(__builtin_inf())), zero, dp);  // masked: 0 * NaN is NaN
      sum = sum + p;
      product = multiply_add(p, dp, product);
      store(scores + k, p);
      store(grads + k, dp);
    }
    const T inverse = normaliser(RowState<T>{T(0), sum_of(sum)});
    return {inverse, sum_of(product) * inverse + delta};
  }

  // Maximum and sum of the tile's rows, to the last bit those of what exponent() gives.
  void recompute_shifts(const RowTile& tile, int worker) const {
    BackwardScratch<E> s = scratch(worker);
    RowTerms<T> row = s.group.row[0];
    RowState<T> state[kTileRows];
    for (RowState<T>& one : state) one = empty_row<T>();
    pack_rows<E>(block<Storage>(p_, p_.query, tile), tile_rows(tile), p_.head_dim, s.query);
    const Range range = key_range(p_, tile.rows);
    for (int64_t t = range.begin / kTileKeys; t * kTileKeys < range.end; ++t) {
      const Range keys = key_tile(p_, t);
      const TileTerms terms = tile_terms<T>(p_, tile_kind(p_, tile.rows, keys), keys);
      pack_panels_transposed<E>(block<Storage>(p_, p_.key, tile.batch, tile.kv_head, keys.begin), count(keys),
                                p_.head_dim, s.numbers, s.key_columns);
      multiply<Layout::rows, Terms::all>(tile_rows(tile), count(keys), steps_of<E>(p_.head_dim), s.query, s.key_columns,
                                         s.scores, kRowStride<T>, false);
      for (int64_t r = 0; r < tile_rows(tile); ++r) {
        T* scores = s.scores + r * kRowStride<T>;
        load_terms(p_, tile, r, keys, terms, kNextKeys, row);
        finish_scores<T>(p_, terms, row, keys, scores, nullptr);
        add_to_state(state[r], scores, seen_vectors(terms, row, keys));
      }
    }
    for (int64_t r = 0; r < tile_rows(tile); ++r)
      plan_.shift[row_index(tile, r)] = {shift(state[r].maximum),
                                         state[r].sum == T(0) ? T(0) : T(kLog2e) * log(state[r].sum)};
  }

  void add_to_state(RowState<T>& state, const T* scores, Range seen) const {
    Vec<T> highest(-T(__builtin_inf())), sum(T(0));
    for (int64_t k = seen.begin; k < seen.end; k += kLanes<T>) highest = maximum(load(scores + k), highest);
    const T maximum = maximum_of(highest) * unit_.natural;
    if (maximum > state.maximum) {
      if (state.sum != T(0)) state.sum *= exp(state.maximum - maximum);
      state.maximum = maximum;
    }
    const Vec<T> offset(shift(state.maximum));
    for (int64_t k = seen.begin; k < seen.end; k += kLanes<T>)
      sum = sum + exp2(exponent(load(scores + k), offset, Vec<T>(T(0))));
    state.sum += sum_of(sum);
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
    load_row_terms(tile, s);
    T zero = T(0);  // x - x is 0 for finite x, NaN otherwise
    for (int64_t r = 0; r < rows; ++r) zero += (s.delta[r] - s.delta[r]) + (s.shift[r].offset - s.shift[r].offset);
    s.finite = zero == T(0) && s.queries.finite && s.grad_outputs.finite && s.keys.finite && s.value_columns.finite;
  }

  // Whether all keys that row i sees are in one tile. Decided row by row, so that it is the same in whatever tile of rows i is.
  bool is_whole(int64_t i) const {
    if (plan_.whole_rows || p_.part.given) return plan_.whole_rows;
    const Range keys = row_keys(p_, i);
    return keys.begin < keys.end && keys.begin / kTileKeys == (keys.end - 1) / kTileKeys;
  }

  // shift and delta of the tile's rows; of whole rows, only what the tile of scores does not tell.
  void load_row_terms(const RowTile& tile, BackwardScratch<E>& s) const {
    const Block<T> lse = block<T>(p_, p_.lse, tile), grad_lse = block<T>(p_, p_.grad_lse, tile);
    for (int64_t r = 0; r < tile_rows(tile); ++r) {
      s.whole[r] = is_whole(row_of(tile, r));
      if (s.whole[r]) {
        s.shift[r] = {shift(*lse.row(r)), T(0)};
        s.delta[r] = grad_lse.data ? -*grad_lse.row(r) : T(0);
      } else {
        s.shift[r] = plan_.shift[row_index(tile, r)];
        s.delta[r] = plan_.delta[row_index(tile, r)];
      }
    }
  }

  void run_key_tile(int64_t plane, int64_t t, int64_t slab, T* grad_query, BackwardScratch<E>& s) const {
    const int64_t batch = plane / p_.kv_heads, kv_head = plane % p_.kv_heads, group = p_.heads / p_.kv_heads;
    const int64_t key_width = padded<T>(p_.head_dim), value_width = padded<T>(p_.value_dim);
    const Range all = key_tile(p_, t);
    load_key_tile(batch, kv_head, all, s);
    T* const grad_key = in_place(p_.grad_key, batch, kv_head, all.begin, p_.head_dim, s.grad_key);
    T* const grad_value = in_place(p_.grad_value, batch, kv_head, all.begin, p_.value_dim, s.grad_value);
    bool begun = false;  // the first product is not added to anything, unless it leaves out keys
    const auto begin = [&] {
      clear_row(grad_key, count(all) * key_width);
      clear_row(grad_value, count(all) * value_width);
      begun = true;
    };
    if (!p_.grad_output.data) begin();
    for (int64_t index = 0; index < tiles_per_plane(tiling_); ++index) {
      const RowTile tile = row_tile(p_, tiling_, plane, index);
      const Range keys = seen_keys(p_, tile, all);
      const TileKind kind = tile_kind(p_, tile.rows, keys);
      if (kind == TileKind::skip || excluded(p_, tile, keys)) {
        if (one_tile_) store_zeros(tile, s);
        continue;
      }
      if (!begun && count(keys) < count(all)) begin();
      load_row_tile(tile, s);
      score_gradients(tile, keys, keys.begin - all.begin, kind, slab, s);
      const int64_t first_key = keys.begin - all.begin;
      add_products(tile, keys, grad_key + first_key * key_width, grad_value + first_key * value_width, begun, s);
      begun = true;
      if (!p_.grad_query.data || plan_.apart) continue;
      if (one_tile_) {
        T* sum = s.grad_query;
        if (tile.heads == 1)
          sum = in_place(p_.grad_query, tile.batch, tile.first_head, tile.rows.begin, p_.head_dim, sum);
        add_grad_query(tile, keys, first_key, sum, false, s);
        store_row_tile(tile, sum);
      } else {
        const int64_t row = (tile.first_head - kv_head * group) * p_.query_length + tile.rows.begin;
        add_grad_query(tile, keys, first_key, grad_query + row * key_width, true, s);
      }
    }
    if (!begun) begin();
    store_rows(grad_key, key_width, stores_.scores, p_.grad_key, batch, kv_head, all, p_.head_dim);
    store_rows(grad_value, value_width, stores_.weights, p_.grad_value, batch, kv_head, all, p_.value_dim);
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

  // S and dP, then, a group of rows at a time, Pd and dX.
  void score_gradients(const RowTile& tile, Range keys, int64_t first, TileKind kind, int64_t slab,
                       const BackwardScratch<E>& s) const {
    const int64_t rows = tile_rows(tile);
    const TileTerms terms = tile_terms<T>(p_, kind, keys);
    multiply<Layout::rows, Terms::all>(rows, count(keys), steps_of<E>(p_.head_dim), s.query,
                                       s.key_columns.from_column(first), s.scores, kRowStride<T>, false);
    if (p_.grad_output.data)
      multiply<Layout::rows, Terms::all>(rows, count(keys), steps_of<E>(p_.value_dim), s.grad_output,
                                         s.value_columns.from_column(first), s.grads, kRowStride<T>, false);
    else
      clear_row(s.grads, rows * kRowStride<T>);
    const bool general = has_slopes(terms) || p_.grad_weights.data || (mask_.wanted() && !scores_are_operands(s));
    GroupTerms<E> group = s.group;
    for (int64_t r = 0; r < rows; r += kGroup) {
      if (general)
        p_.dropout_p > 0 ? group_gradients<true, true>(tile, r, keys, terms, slab, group, s)
                         : group_gradients<true, false>(tile, r, keys, terms, slab, group, s);
      else
        p_.dropout_p > 0 ? group_gradients<false, true>(tile, r, keys, terms, slab, group, s)
                         : group_gradients<false, false>(tile, r, keys, terms, slab, group, s);
    }
  }

  // Whether d score / d (scale * dot product) is anything but 1.
  static bool has_slopes(const TileTerms& terms) { return terms.softcap || terms.replaced; }

  // Whether dS, where it has no slopes, is what lies in s.grad_rows: numbers, and no marks among them.
  static bool scores_are_operands(const BackwardScratch<E>& s) { return kNumbers<E> == 1 && s.finite; }

  // Rows r, ..., r + kGroup - 1 of the tile. kGeneral: there are slopes, dW, or a place of its own for dS.
  template <bool kGeneral, bool kDropout>
  void group_gradients(const RowTile& tile, int64_t r, Range keys, const TileTerms& terms, int64_t slab,
                       GroupTerms<E>& group, const BackwardScratch<E>& s) const {
    Finite<T> unused;
    const int here = int(smaller<int64_t>(kGroup, tile_rows(tile) - r));
    Range seen[kGroup] = {};
    bool finite[kGroup] = {};
    Vec<T> offset[kGroup] = {}, log2_sum[kGroup] = {}, inverse_sum[kGroup] = {}, minus_delta[kGroup] = {};
    for (int g = 0; g < here; ++g) {
      RowTerms<T>& row = group.row[g];
      load_terms(p_, tile, r + g, keys, terms, {-tiling_.rows, 0}, row);
      finish_scores(p_, terms, row, keys, s.scores + (r + g) * kRowStride<T>,
                    kGeneral && has_slopes(terms) ? group.slopes + g * kTileKeys : nullptr);
      seen[g] = seen_vectors(terms, row, keys);
      finite[g] = s.finite;
      offset[g] = Vec<T>(s.shift[r + g].offset);
      log2_sum[g] = Vec<T>(s.shift[r + g].log_sum);
      minus_delta[g] = Vec<T>(-s.delta[r + g]);
      if (kGeneral && p_.grad_weights.data) {
        const Block<Storage> grad =
            block<Storage>(p_, p_.grad_weights, tile.batch, head_of(tile, r + g), row_of(tile, r + g));
        load_row(grad.data + keys.begin * grad.col_stride, grad.col_stride, count(keys),
                 group.grad_weights + g * kTileKeys, unused);
      }
    }
    for (int g = 0; g < here; ++g) {
      if (!s.whole[r + g]) continue;
      const int64_t line = (r + g) * kRowStride<T>;
      const WholeRow whole =
          whole_row<kGeneral, kDropout>(group, g, seen[g], offset[g], s.scores + line, s.grads + line, s.delta[r + g]);
      finite[g] &= (whole.inverse_sum - whole.inverse_sum) + (whole.delta - whole.delta) == T(0);
      inverse_sum[g] = Vec<T>(whole.inverse_sum);
      minus_delta[g] = Vec<T>(-whole.delta);
    }
    const Vec<T> zero(T(0)), kept(T(1.0 / (1.0 - p_.dropout_p)));
    const int64_t line = r / kGroup * kColumnStride<E>;
    for (int64_t k = 0; k < count(keys); k += kLanes<T>) {
      Vec<T> weights[kGroup], grads[kGroup];
#pragma GCC unroll 2
      for (int g = 0; g < kGroup; ++g) {
        weights[g] = grads[g] = zero;
        if (k < seen[g].begin || k >= seen[g].end) {
          if (kGeneral && mask_.wanted()) store(group.grad_scores + g * kTileKeys + k, zero);
          continue;
        }
        Vec<T> p = load(s.scores + (r + g) * kRowStride<T> + k), dp = load(s.grads + (r + g) * kRowStride<T> + k);
        Vec<T> difference;
        if (s.whole[r + g]) {
          p = p * inverse_sum[g];
          difference = dp + minus_delta[g];
        } else {
          p = exp2(exponent(p, offset[g], log2_sum[g]));
          if (kGeneral && p_.grad_weights.data) dp = dp + load(group.grad_weights + g * kTileKeys + k);
          difference = dp + minus_delta[g];
          if constexpr (kDropout)
            difference = select(kept_lanes(group.row[g], k), multiply_add(dp, kept, minus_delta[g]), minus_delta[g]);
        }
        weights[g] = p;
        if constexpr (kDropout) weights[g] = select(kept_lanes(group.row[g], k), p, zero);
        grads[g] = p * difference;
        if constexpr (kGeneral) {
          if (mask_.wanted()) store(group.grad_scores + g * kTileKeys + k, grads[g]);
          if (has_slopes(terms)) grads[g] = grads[g] * load(group.slopes + g * kTileKeys + k);
          if (terms.replaced) grads[g] = select(bytes_equal<T>(group.row[g].state + k, kReplaced), zero, grads[g]);
        }
      }
      Operand<E>::store_across(s.weights + line + k, weights);
      Operand<E>::store_across(s.grad_columns + line + k, grads);
      if constexpr (kGroup > 1)
        for (int g = 0; g < here; ++g) Operand<E>::store_along(s.grad_rows + (r + g) * kRowStride<E>, k, grads[g]);
    }
    for (int g = 0; g < here; ++g) {
      if (!finite[g]) mark_masked_row(tile, r + g, keys, terms, group, s);
      if (!mask_.wanted()) continue;
      const T* grads = kGeneral ? group.grad_scores + g * kTileKeys : s.grads + (r + g) * kRowStride<T>;
      mask_.add(tile.batch, head_of(tile, r + g), row_of(tile, r + g), keys, slab, grads);
    }
  }

  void mark_masked_row(const RowTile&, int64_t r, Range keys, const TileTerms& terms, const GroupTerms<E>& group,
                       const BackwardScratch<E>& s) const {
    using Number = NumberOf<E>;
    const int g = int(r % kGroup);
    const int64_t line = r / kGroup * kColumnStride<E>;
    mark_masked(terms, group.row[g], keys, reinterpret_cast<Number*>(s.weights + line) + g, kGroup);
    mark_masked(terms, group.row[g], keys, reinterpret_cast<Number*>(s.grad_columns + line) + g, kGroup);
    if (kGroup > 1)
      mark_masked(terms, group.row[g], keys, reinterpret_cast<Number*>(s.grad_rows + r * kRowStride<E>), 1);
    T* grads = group.grad_scores + g * kTileKeys;
    mark_masked(terms, group.row[g], keys, grads, 1);
    for (int64_t k = 0; k < count(keys); ++k) grads[k] = is_skip(grads[k]) ? T(0) : grads[k];
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

  void store_grad_query(int64_t plane, const T* from, Range rows) const {
    if (!p_.grad_query.data) return;
    const int64_t batch = plane / p_.kv_heads, first_head = plane % p_.kv_heads * (p_.heads / p_.kv_heads);
    for (int64_t r = rows.begin; r < rows.end; ++r)
      narrow_row(from + r * padded<T>(p_.head_dim), stores_.scores, p_.head_dim,
                 at<Storage>(p_, p_.grad_query, batch, first_head + r / p_.query_length) +
                     r % p_.query_length * p_.grad_query.row_stride);
  }

  const Problem& p_;
  const BackwardPlan<E>& plan_;
  const MaskGradient<T>& mask_;
  const Tiling tiling_;
  const Unit<T> unit_;
  const bool one_tile_;  // of keys: a row tile's dQ is done when its scores are
  const Factors products_, stores_;
};

template <class Storage, class E>
void run_backward(const Problem& p, const Executor& executor) {
  using T = SumOf<E>;
  Arena arena = {static_cast<char*>(executor.workspace), 0};
  const BackwardPlan<E> plan = plan_backward<E>(p, executor.workers, arena);
  const MaskGradient<T> mask(p, plan.slabs, arena);
  const Backward<Storage, E> pass(p, plan, mask);
  const int64_t planes = p.batch * p.kv_heads;
  const int64_t tiles = tiles_per_plane(tile_problem(p, Cut::even));
  if (!plan.whole_rows)
    parallel(executor, planes * tiles,
             [&](int64_t task, int worker) { pass.prepare_rows(task / tiles, task % tiles, worker); });
  if (plan.apart) {
    if (p.grad_key.data || p.grad_value.data)
      parallel(executor, planes * plan.key_tiles,
               [&](int64_t task, int worker) { pass.run_keys(task % planes, task / planes, worker); });
    const Tiling shares = tile_for_workers(p, executor.workers);
    if (p.grad_query.data)
      parallel(executor, planes * tiles_per_plane(shares),
               [&](int64_t task, int worker) { pass.run_rows(shares, task % planes, task / planes, worker); });
    return;
  }
  if (mask.wanted()) mask.clear(executor);
  parallel(executor, plan.classes * plan.slabs,
           [&](int64_t task, int worker) { pass.run(task % plan.classes, task / plan.classes, worker); });
  if (plan.slabs > 1 && p.grad_query.data) {
    const int64_t rows = p.heads / p.kv_heads * p.query_length, step = 8 * kUsualTileRows, steps = ceil_div(rows, step);
    parallel(executor, planes * steps, [&](int64_t task, int) {
      const int64_t begin = task % steps * step;
      pass.sum_slabs(task / steps, {begin, smaller(begin + step, rows)});
    });
  }
  if (mask.wanted()) mask.finish(executor);
}

}  // namespace
}  // namespace scaledot
