// What the backward (backward.h) knows of a row before it looks at a tile of its scores: its SplitLse, and delta.
#pragma once

#include "cpu/simd/backward_plan.h"

namespace scaledot {
namespace {

// P without its sum: exp2 of this is exp(s - offset).
template <class T>
SCALEDOT_INLINE Vec<T> exponent(const Unit<T>& unit, Vec<T> s, Vec<T> offset, Vec<T> log2_sum) {
  const Vec<T> difference = fma(s, Vec<T>(unit.natural), Vec<T>(T(0)) - offset);
  return fma(difference, Vec<T>(T(kLog2e)), Vec<T>(T(0)) - log2_sum);
}

template <class Storage, class E>
class BackwardRows {
  using T = SumOf<E>;

 public:
  BackwardRows(const Problem& p, const BackwardPlan<E>& plan) : p_(p), plan_(plan), unit_(unit_of<T>(p)) {}

  // Computes both for the tile's rows. few: the tile is all that there is of them in its plane.
  void prepare(const RowTile& tile, bool few, const BackwardScratch<E>& s) const {
    // float64 is asked for its precision; and over few rows lse's rounding errors, one to a row, do not average out.
    bool plain = sizeof(T) == sizeof(float) && !few;
    for (int64_t r = 0; r < tile_rows(tile); ++r) {
      const int64_t head = head_of(tile, r), i = row_of(tile, r);
      const T lse = shift(at<T>(p_, p_.lse, tile.batch, head)[i * p_.lse.row_stride]);
      plan_.delta[row_index(tile, r)] = delta(tile.batch, head, i);
      plan_.shift[row_index(tile, r)] = {lse, T(0)};
      plain &= lse_is_precise(lse);
    }
    if (!plain && !p_.part.given) recompute_shifts(tile, s);  // not all keys are in a part
  }

  // Fills in both; of whole rows, only what the tile of scores does not tell.
  void fill(const RowTile& tile, BackwardScratch<E>& s) const {
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

 private:
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
        sums = fma(widen_load(a.data + d), widen_load(b.data + d), sums);
    T sum = sum_of(sums);
    for (; d < cols; ++d) sum += T(widen(a.data[d * a.col_stride])) * T(widen(b.data[d * b.col_stride]));
    return sum;
  }

  // Maximum and sum of the tile's rows, to the last bit those of what exponent() gives.
  void recompute_shifts(const RowTile& tile, const BackwardScratch<E>& s) const {
    Panels<E> key_columns = s.key_columns;
    RowTerms<T> row = s.group.row[0];
    RowState<T> state[kTileRows];
    for (RowState<T>& one : state) one = empty_row<T>();
    pack_rows<E>(block<Storage>(p_, p_.query, tile), tile_rows(tile), p_.head_dim, s.query);
    for_each_tile(p_, key_range(p_, tile.rows), [&](Range keys) {
      const TileTerms terms = tile_terms<T>(p_, tile, keys);
      pack_panels_transposed<E>(block<Storage>(p_, p_.key, tile.batch, tile.kv_head, keys.begin), count(keys),
                                p_.head_dim, s.numbers, key_columns);
      multiply<Layout::rows, Terms::all>(tile_rows(tile), count(keys), steps_of<E>(p_.head_dim), s.query, key_columns,
                                         s.scores, kRowStride<T>, false);
      for (int64_t r = 0; r < tile_rows(tile); ++r) {
        T* scores = s.scores + r * kRowStride<T>;
        load_terms(p_, tile, r, keys, terms, kNextKeys, row, r > 0);
        finish_scores<T>(p_, terms, row, keys, scores, nullptr);
        add_to_state(state[r], scores, seen_vectors(terms, row, keys));
      }
    });
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
      sum = sum + exp2(exponent(unit_, load(scores + k), offset, Vec<T>(T(0))));
    state.sum += sum_of(sum);
  }

  // Whether all keys that row i sees are in one tile. Decided row by row, so that it is the same in whatever tile of rows i is.
  bool is_whole(int64_t i) const {
    if (plan_.whole_rows || p_.part.given) return plan_.whole_rows;
    const Range keys = row_keys(p_, i);
    return keys.begin < keys.end && keys.begin / kTileKeys == (keys.end - 1) / kTileKeys;
  }

  const Problem& p_;
  const BackwardPlan<E>& plan_;
  const Unit<T> unit_;
};

}  // namespace
}  // namespace scaledot
