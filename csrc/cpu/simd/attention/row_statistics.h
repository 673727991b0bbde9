// Row statistics of the backward: the softmax of a row, as RowSoftmax (backward_plan.h), and delta.
//
//   delta_i = sum_d dO_id O_id + sum_j dW_ij W_ij - dlse_i         (O: with its low part, core/saved.h)
#pragma once

#include "core/saved.h"
#include "cpu/simd/attention/backward_plan.h"

namespace scaledot {
namespace {

// exp2(exponent(s)) = exp(score - offset), for a stored score s.
template <class Sum>
SCALEDOT_INLINE Vec<Sum> exponent(const ScoreUnit<Sum>& unit, Vec<Sum> s, Vec<Sum> offset) {
  return fma(s, Vec<Sum>(unit.natural), Vec<Sum>(Sum(0)) - offset) * Vec<Sum>(Sum(kLog2e));
}

// Q K^T or dO V^T of a tile, in the order of the forward. `width`: head_dim or value_dim.
template <class Operand>
inline void multiply_tile(const QueryTile& tile, Range keys, int64_t width, const Operand* rows,
                          const Panels<Operand>& columns, SumOf<Operand>* to) {
  multiply<Layout::rows, OnMasked::multiply>(tile_rows(tile), count(keys), depth_of<Operand>(width), rows, columns, to,
                                             kRowStride<SumOf<Operand>>, false);
}

template <class Operand>
class RowStatistics {
  using Sum = SumOf<Operand>;

 public:
  RowStatistics(const Problem& p, const BackwardPlan<Operand>& plan) : p_(p), plan_(plan), unit_(score_unit<Sum>(p)) {}

  // Computes both for the rows of a tile, into the plan. `few`: the KV group has no other tile.
  void prepare(const QueryTile& tile, bool few, const BackwardScratch<Operand>& s) const {
    // lse is used as it is only in float32, and only with many rows, over which its rounding errors average out.
    bool plain = sizeof(Sum) == sizeof(float) && !few;
    for (int64_t r = 0; r < tile_rows(tile); ++r) {
      const int64_t head = head_of(tile, r), i = row_of(tile, r);
      const Sum lse = shift(element_ptr<Sum>(p_, p_.lse, tile.batch, head)[i * p_.lse.row_stride]);
      with_storage_of<Operand>(p_.dtype, [&]<class Storage>(Type<Storage>) {
        plan_.delta[row_index(tile, r)] = delta<Storage>(tile.batch, head, i);
      });
      plan_.softmax[row_index(tile, r)] = {lse, Sum(1)};
      plain &= lse_is_precise(lse);
    }
    if (plain || p_.part.given || saves_whole_softmax(p_)) return;  // the keys of a part are not all here
    with_storage_of<Operand>(p_.dtype, [&]<class Storage>(Type<Storage>) { recompute_softmax<Storage>(tile, s); });
  }

  // Copies lse and delta to the scratch memory. A whole row gets only what the tile of scores does not give.
  void fill(const QueryTile& tile, BackwardScratch<Operand>& s) const {
    const RowBlock<Sum> lse = block<Sum>(p_, p_.lse, tile), grad_lse = block<Sum>(p_, p_.grad_lse, tile);
    for (int64_t r = 0; r < tile_rows(tile); ++r) {
      s.whole[r] = is_whole(row_of(tile, r));
      if (s.whole[r]) {
        s.softmax[r] = {shift(*lse.row(r)), Sum(1)};
        s.delta[r] = grad_lse.data ? -*grad_lse.row(r) : Sum(0);
      } else {
        s.softmax[r] = plan_.softmax[row_index(tile, r)];
        s.delta[r] = plan_.delta[row_index(tile, r)];
      }
    }
  }

 private:
  int64_t row_index(const QueryTile& tile, int64_t r) const {
    return (tile.batch * p_.heads + head_of(tile, r)) * p_.query_length + row_of(tile, r);
  }

  template <class Storage>
  Sum delta(int64_t batch, int64_t head, int64_t i) const {
    const RowBlock<Storage> output = block<Storage>(p_, p_.output, batch, head, i);
    const RowBlock<Storage> output_low = block<Storage>(p_, p_.output_low, batch, head, i);
    const RowBlock<Storage> grad = block<Storage>(p_, p_.grad_output, batch, head, i);
    const RowBlock<Storage> weights = block<Storage>(p_, p_.weights, batch, head, i);
    const RowBlock<Storage> grad_weights = block<Storage>(p_, p_.grad_weights, batch, head, i);
    const Sum* grad_lse = element_ptr<Sum>(p_, p_.grad_lse, batch, head);
    Sum sum = grad.data ? dot(output, grad, p_.value_dim) : Sum(0);
    if (grad.data && output_low.data) sum += dot(output_low, grad, p_.value_dim);
    if (grad_weights.data) sum += dot(weights, grad_weights, p_.key_length);
    return grad_lse ? sum - grad_lse[i * p_.grad_lse.row_stride] : sum;
  }

  // The dot product of the first rows of two blocks. Its bits do not depend on their strides: the gradient of a sum is
  // expanded, and torch.compile makes it contiguous. The last columns are a vector too: compilers round the products of
  // a scalar loop in one copy of the loop and not in another.
  template <class Storage>
  static Sum dot(const RowBlock<Storage>& a, const RowBlock<Storage>& b, int64_t cols) {
    Vec<Sum> sums(Sum(0));
    int64_t d = 0;
    if (a.col_stride == 1 && b.col_stride == 1)
      for (; d + kLanes<Sum> <= cols; d += kLanes<Sum>)
        sums = fma(widen_load(a.data + d), widen_load(b.data + d), sums);
    for (; d < cols; d += kLanes<Sum>) sums = fma(gathered(a, d, cols), gathered(b, d, cols), sums);
    return sum_of(sums);
  }

  // Columns [d, d + kLanes) of a row; zeros from column `cols` on.
  template <class Storage>
  static Vec<Sum> gathered(const RowBlock<Storage>& row, int64_t d, int64_t cols) {
    Storage elements[kLanes<Sum>]{};
    for (int64_t k = 0; k < min<int64_t>(kLanes<Sum>, cols - d); ++k) elements[k] = row.data[(d + k) * row.col_stride];
    return widen_load(elements);
  }

  // Recomputes maximum and sum of the tile's rows, with the rounding of exponent().
  template <class Storage>
  SCALEDOT_NOINLINE void recompute_softmax(const QueryTile& tile, const BackwardScratch<Operand>& s) const {
    Panels<Operand> key_columns = s.key_columns;
    RowTerms<Sum> row = s.group.row[0];
    RowState<Sum> state[kTileRows];
    for (RowState<Sum>& one : state) one = empty_row<Sum>();
    pack_rows<Operand>(block<Storage>(p_, p_.query, tile), tile_rows(tile), p_.head_dim, s.query);
    for_each_tile(p_, key_range(p_, tile.rows), [&](Range keys) {
      if (excluded(p_, tile, keys)) return;
      const ScoreFlags flags = score_flags<Sum>(p_, tile, keys);
      pack_panels_transposed<Operand>(key_rows<Storage>(p_, p_.key, tile.batch, tile.kv_head, keys), count(keys),
                                      p_.head_dim, s.staging, key_columns);
      multiply_tile(tile, keys, p_.head_dim, s.query, key_columns, s.scores);
      for (int64_t r = 0; r < tile_rows(tile); ++r) {
        Sum* scores = s.scores + r * kRowStride<Sum>;
        load_terms(p_, tile, r, keys, flags, kNextKeys, row, r > 0);
        finish_scores_outlined<Sum>(p_, flags, row, keys, scores, nullptr);
        add_to_state(state[r], scores, seen_vectors(row, keys));
      }
    });
    for (int64_t r = 0; r < tile_rows(tile); ++r)
      plan_.softmax[row_index(tile, r)] = {shift(state[r].maximum), normaliser(state[r])};
  }

  void add_to_state(RowState<Sum>& state, const Sum* scores, Range seen) const {
    Vec<Sum> highest(-Sum(__builtin_inf())), sum(Sum(0));
    for (int64_t k = seen.begin; k < seen.end; k += kLanes<Sum>) highest = maximum(load(scores + k), highest);
    const Sum maximum = maximum_of(highest) * unit_.natural;
    if (maximum > state.maximum) {
      if (state.sum != Sum(0)) state.sum *= exp(state.maximum - maximum);
      state.maximum = maximum;
    }
    const Vec<Sum> offset(shift(state.maximum));
    for (int64_t k = seen.begin; k < seen.end; k += kLanes<Sum>)
      sum = sum + exp2(exponent(unit_, load(scores + k), offset));
    state.sum += sum_of(sum);
  }

  // Whether all keys that row i attends to by position are in one tile. Independent of the query tile that i is in.
  bool is_whole(int64_t i) const {
    if (plan_.whole_rows || p_.part.given) return plan_.whole_rows;
    const Range keys = row_keys(p_, i);
    return keys.begin < keys.end && keys.begin / kTileKeys == (keys.end - 1) / kTileKeys;
  }

  const Problem& p_;
  const BackwardPlan<Operand>& plan_;
  const ScoreUnit<Sum> unit_;
};

}  // namespace
}  // namespace scaledot
