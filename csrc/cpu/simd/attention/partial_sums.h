// m, l and O (softmax.h) of all query rows of a KV group over one split of its keys, and their sum over the splits.
//
//   m = max_s m_s      w_s = exp(m_s - m)      l = sum_s w_s l_s      O = sum_s w_s O_s      splits s in order
//   output = O / (l (1 - dropout_p))           lse = m + log l
// The splits depend on the shape alone, so results do not depend on threads. ("Flash-Decoding", Dao et al. 2023.)
#pragma once

#include "cpu/simd/attention/softmax.h"

namespace scaledot {
namespace {

template <class Sum>
struct PartialSums {
  int64_t splits;            // of the keys of a KV group
  int64_t rows;              // query rows of a KV group: those of its first head, then of the next
  int64_t width;             // value_dim padded
  SoftmaxRows<Sum> softmax;  // (KV group, split, row)
  Sum* output;               // (KV group, split, row, width)

  int64_t first_row(int64_t kv_group, int64_t split) const { return (kv_group * splits + split) * rows; }
};

// Room for the sums of `kv_groups` KV groups.
template <class Sum>
PartialSums<Sum> lay_out_partial_sums(const Problem& p, int64_t kv_groups, int64_t splits, Arena& arena) {
  PartialSums<Sum> sums = {splits, p.heads / p.kv_heads * p.query_length, padded<Sum>(p.value_dim), {}, nullptr};
  const int64_t all = sums.first_row(kv_groups, 0);
  sums.softmax = lay_out_softmax<Sum>(arena, all);
  sums.output = take<Sum>(arena, all * sums.width);
  return sums;
}

inline QueryTile all_rows(const Problem& p, int64_t kv_group) {
  const int64_t kv_head = kv_group % p.kv_heads, group = p.heads / p.kv_heads;
  return {kv_group / p.kv_heads, kv_head, kv_head * group, group, {0, p.query_length}};
}

// Output and lse of a row, from its sum and its maximum, which is in the unit of scores.
template <class Sum>
void write_row(const Problem& p, const QueryTile& tile, int64_t r, const ScoreUnit<Sum>& unit, RowState<Sum> state,
               const Sum* sum) {
  state.maximum *= unit.natural;
  const int64_t head = head_of(tile, r), i = row_of(tile, r);
  const Sum factor = Sum(dropout_scale(p) * cache_scale(p, p.v_scale, tile.batch, tile.kv_head));
  with_storage_of<Sum>(p.dtype, [&]<class Storage>(Type<Storage>) {
    write_output_row<Storage>(p, tile.batch, head, i, sum, output_factor(state, factor));
  });
  if (p.lse.data) element_ptr<Sum>(p, p.lse, tile.batch, head)[i * p.lse.row_stride] = logsumexp(state);
}

// Adds the splits of row r of a KV group, in the memory of the first, and writes output and lse.
template <class Sum>
void merge_splits(const Problem& p, const PartialSums<Sum>& partial, int64_t kv_group, int64_t r) {
  const QueryTile tile = all_rows(p, kv_group);
  const ScoreUnit<Sum> unit = score_unit<Sum>(p, tile);
  const auto state_at = [&](int64_t row) -> RowState<Sum> {
    return {partial.softmax.lazy_max[row], sum_of(load(partial.softmax.sum + row * kLanes<Sum>))};
  };
  // Rescales sums from state.maximum to `maximum`. 0 for an empty row, whose exponential may be anything.
  const auto factor = [&](const RowState<Sum>& state, Sum maximum) -> Sum {
    if (state.sum == Sum(0)) return Sum(0);
    return exp2(Vec<Sum>((shift(state.maximum) - shift(maximum)) * unit.log2)).v[0];
  };
  const int64_t first = partial.first_row(kv_group, 0) + r;
  RowState<Sum> total = state_at(first);
  Sum* const sum = partial.output + first * partial.width;
  for (int64_t split = 1; split < partial.splits; ++split) {
    const int64_t row = first + split * partial.rows;
    const RowState<Sum> state = state_at(row);
    if (state.sum == Sum(0)) continue;
    const Sum maximum = max(total.maximum, state.maximum);
    const Sum keep = factor(total, maximum), add = factor(state, maximum);
    total = {maximum, total.sum * keep + state.sum * add};
    const Sum* other = partial.output + row * partial.width;
    for (int64_t d = 0; d < partial.width; d += kLanes<Sum>)
      store(sum + d, fma(load(other + d), Vec<Sum>(add), load(sum + d) * Vec<Sum>(keep)));
  }
  write_row(p, tile, r, unit, total, sum);
}

}  // namespace
}  // namespace scaledot
