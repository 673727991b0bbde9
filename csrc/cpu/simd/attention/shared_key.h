// Keeps the gradient of query exact where keys have much in common, as with a massive activation or a large bias.
//
// If every key is a shared vector c and a small rest, dQ_i = sum_j dX_ij K_j hardly depends on c, because the exact dS
// of a row sums to dlse_i. But dX is rounded to bfloat16 for the product, and delta has an error, too. Both make an
// error of c times their sum over the row, which may be far larger than dQ. It is added again:
//
//   dQ_i += c lost_i       lost_i = sum_j dX_ij - sum_j r_ij - (sum_j dS_ij - dlse_i) sum_j slope_ij P_ij
// where r is dX as rounded. Without slopes, lost_i = dlse_i - sum_j r_ij, because P sums to 1. In a part of a larger
// attention the exact sum of dS is not known, and the last term is left out. c is the mean of some keys. Where keys
// have little in common, nothing is added. Other products than those of Bf16Pairs do not round dX.
#pragma once

#include "cpu/simd/attention/backward_plan.h"

namespace scaledot {
namespace {

constexpr int64_t kSharedKeySamples = 16;
// The least share of the mean in the squares of keys. Where keys differ more, c sum_j e_ij says little about the error.
constexpr double kSharedKeyLeast = 0.9;

// Finds the mean of some keys, and whether they are alike.
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
  shared.large = sum_of(of_mean) * Sum(samples) > Sum(kSharedKeyLeast) * sum_of(squares);
}

// Adds the sums of a key tile to the numbers of each row: without slopes -sum r; otherwise sum dX - sum r, in the next
// padded(rows) numbers sum dS, and then sum slope P.
template <class Operand>
SCALEDOT_NOINLINE void add_lost(const Problem& p, int64_t rows, int64_t keys, const BackwardScratch<Operand>& s,
                                SumOf<Operand>* numbers, bool accumulate) {
  using Sum = SumOf<Operand>;
  ElementOf<Operand> ones[kElements<Operand>];
  for (auto& element : ones) narrow(Sum(-1), element);
  const Vec<Operand> minus_one(__builtin_bit_cast(Operand, ones));
  const bool complete = score_gradients_are_complete(p);
  const auto add = [&](Vec<Sum> sum, Sum& to) { to = sum_of(sum) + (accumulate ? to : Sum(0)); };
  for (int64_t r = 0; r < rows; ++r) {
    Vec<Sum> sum = complete ? Vec<Sum>(Sum(0)) : s.row_sums[r].operands;
    for (int64_t k = 0; k < depth_of<Operand>(keys); k += kLanes<Sum>)
      sum = fma(load(s.grad_rows + r * kRowStride<Operand> + k), minus_one, sum);
    add(sum, numbers[r]);
    if (complete) continue;
    add(s.row_sums[r].scores, numbers[padded<Sum>(rows) + r]);
    add(s.row_sums[r].slopes, numbers[2 * padded<Sum>(rows) + r]);
  }
}

// Adds c lost_i to the rows of dQ, which are to be multiplied by scale / factor.
template <class Sum>
SCALEDOT_NOINLINE void add_shared_key(const Problem& p, const QueryTile& tile, Sum factor, const SharedKey<Sum>& shared,
                                      Sum* grad_query) {
  const int64_t width = padded<Sum>(p.head_dim), rows = tile_rows(tile), next = padded<Sum>(rows);
  const Sum* numbers = grad_query + rows * width;
  for (int64_t r = 0; r < rows; ++r, ++numbers, grad_query += width) {
    const int64_t head = head_of(tile, r), i = row_of(tile, r);
    const Sum lse = element_ptr<const Sum>(p, p.lse, tile.batch, head)[i * p.lse.row_stride];
    const Sum* grad_lse = element_ptr<const Sum>(p, p.grad_lse, tile.batch, head);
    const bool empty = lse == -Sum(__builtin_inf());
    const Sum of_scores = grad_lse && !empty ? grad_lse[i * p.grad_lse.row_stride] : Sum(0);
    Sum lost = numbers[0];
    if (score_gradients_are_complete(p))
      lost += of_scores;
    else if (!p.part.given)
      lost -= (numbers[next] - of_scores) * numbers[2 * next];
    if (lost - lost != Sum(0)) continue;  // dQ is NaN, or a masked key is
    const Vec<Sum> times(lost * factor);
    for (int64_t d = 0; d < width; d += kLanes<Sum>)
      store(grad_query + d, fma(times, load(shared.mean + d), load(grad_query + d)));
  }
}

}  // namespace
}  // namespace scaledot
