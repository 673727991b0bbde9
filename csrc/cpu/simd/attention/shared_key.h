// Keeps the gradient of query exact where keys have much in common, as with a massive activation or a large bias.
//
// If every key is a shared vector c and a small rest, dQ_i = sum_j dX_ij K_j hardly depends on c, because dS sums to
// dlse_i over the keys of a row. But rounding dX to bfloat16 takes e_ij off it, and an error of delta adds to all of a
// row. Both make an error of c times their sum, which may be far larger than dQ. It is added again:
//
//   dQ_i += c (sum_j dX_ij - sum_j r_ij)                                            (r: dX as rounded for the product)
//   sum_j dX_ij = dlse_i where dX is dS of all keys of the row; otherwise dX is summed before it is rounded
// c is the mean of some keys. Where keys have little in common, nothing is added. Only bfloat16 products round dX.
#pragma once

#include "cpu/simd/attention/backward_plan.h"

namespace scaledot {
namespace {

constexpr int64_t kSharedKeySamples = 16;

// Whether dX of a row sums to dlse: it is dS, and of all keys.
inline bool knows_row_sums(const Problem& p) {
  const bool slopes = p.softcap > 0 || p.score_program || (mask_use(p).boolean && !masked_is_excluded(p));
  return !slopes && !p.part.given;
}

// Finds the mean of some keys, and whether at least half of their squares is due to it.
template <class Sum>
SCALEDOT_NOINLINE void find_shared_key(const Problem& p, int64_t batch, int64_t kv_head, SharedKey<Sum>& shared) {
  const int64_t samples = min(p.key_length, kSharedKeySamples), width = padded<Sum>(p.head_dim);
  Sum *const mean = shared.mean, *const row = mean + width;
  clear_row(mean, width);
  Vec<Sum> squares(Sum(0)), of_mean(Sum(0));
  Finite<Sum> unused;
  for (int64_t k = 0; k < samples; ++k) {
    const int64_t j = k * p.key_length / samples;
    const auto key = key_rows<BFloat16, 1>(p, p.key, batch, kv_head, {j, j + 1});
    load_row(key.row(0), key.col_stride, p.head_dim, row, unused);
    for (int64_t d = 0; d < width; d += kLanes<Sum>) {
      const Vec<Sum> x = load(row + d);
      store(mean + d, load(mean + d) + x);
      squares = fma(x, x, squares);
    }
  }
  const Vec<Sum> share(Sum(1) / Sum(max<int64_t>(samples, 1)));
  for (int64_t d = 0; d < width; d += kLanes<Sum>) {
    const Vec<Sum> x = load(mean + d) * share;
    store(mean + d, x);
    of_mean = fma(x, x, of_mean);
  }
  shared.large = 2 * sum_of(of_mean) * Sum(samples) > sum_of(squares);
}

// Adds what a key tile has of sum_j dX_ij - sum_j r_ij to lost[row], without sum_j dX_ij if that is known.
template <class Operand>
SCALEDOT_NOINLINE void add_lost(const Problem& p, int64_t rows, int64_t keys, const BackwardScratch<Operand>& s,
                                SumOf<Operand>* lost, bool accumulate) {
  using Sum = SumOf<Operand>;
  ElementOf<Operand> ones[kElements<Operand>];
  for (auto& element : ones) narrow(Sum(-1), element);
  const Vec<Operand> minus_one(__builtin_bit_cast(Operand, ones));
  const bool known = knows_row_sums(p);
  for (int64_t r = 0; r < rows; ++r) {
    Vec<Sum> sum = known ? Vec<Sum>(Sum(0)) : load(s.grad_sums + r * kLanes<Sum>);
    for (int64_t k = 0; k < depth_of<Operand>(keys); k += kLanes<Sum>)
      sum = fma(load(s.grad_rows + r * kRowStride<Operand> + k), minus_one, sum);
    lost[r] = sum_of(sum) + (accumulate ? lost[r] : Sum(0));
  }
}

// Adds c (sum_j dX_ij - sum_j r_ij) to the rows of dQ, which are to be multiplied by scale / factor.
template <class Sum>
SCALEDOT_NOINLINE void add_shared_key(const Problem& p, const QueryTile& tile, Sum factor, const SharedKey<Sum>& shared,
                                      Sum* grad_query) {
  const int64_t width = padded<Sum>(p.head_dim), rows = tile_rows(tile);
  const Sum* const lost_of = grad_query + rows * width;
  for (int64_t r = 0; r < rows; ++r, grad_query += width) {
    const int64_t head = head_of(tile, r), i = row_of(tile, r);
    Sum lost = lost_of[r];
    const Sum* grad_lse = element_ptr<const Sum>(p, p.grad_lse, tile.batch, head);
    const bool empty = element_ptr<const Sum>(p, p.lse, tile.batch, head)[i * p.lse.row_stride] == -Sum(__builtin_inf());
    if (grad_lse && knows_row_sums(p) && !empty) lost += grad_lse[i * p.grad_lse.row_stride];
    const Vec<Sum> times(lost * factor);
    for (int64_t d = 0; d < width; d += kLanes<Sum>)
      store(grad_query + d, fma(times, load(shared.mean + d), load(grad_query + d)));
  }
}

}  // namespace
}  // namespace scaledot
