// Limits of the errors of a forward's results. rounding_limits.h says what a kernel may round.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "core/philox.h"
#include "core/softmax.h"
#include "problem_builder.h"
#include "rounding_variance.h"

namespace scaledot::testing {

// The largest error of each element of a result, without the rounding to the result's dtype.
struct Limits {
  std::vector<double> output, lse, weights, grad_query, grad_key, grad_value, grad_mask, grad_relative_bias;
};

class RoundingOfForward {
 public:
  // `wide` is the problem with its gradients in float64; limits are for results of `dtype`. `cache`: the type of a
  // quantised cache, with its v_scale, by which `wide` has multiplied V. `tensor_cores`: float16 weights are rounded
  // before products too.
  RoundingOfForward(const Built& wide, DType dtype, DType cache = DType::none, const TensorView& value_scale = {},
                    bool tensor_cores = false)
      : wide_(wide),
        p_(wide.problem()),
        value_scale_(value_scale),
        // Decode kernels sum products with values of E4M3 that are kE4M3Power too small.
        value_power_(cache == DType::float8_e4m3fn ? double(kE4M3Power) : 1),
        keep_scale_(1 / (1 - p_.dropout_p)),
        computes_double_(dtype == DType::float64),
        // The float64 reference has the same errors as a float64 kernel.
        compute_(variance_of(unit_roundoff(lse_dtype(dtype))) * (dtype == DType::float64 ? 2 : 1)),
        storage_(variance_of(unit_roundoff(dtype))),
        stored_(variance_of(half_smallest(dtype))),
        smallest_operand_(dtype == DType::float64 ? 0x1p-1021 : 0x1p-125),
        product_(dtype == DType::bfloat16 || (tensor_cores && dtype == DType::float16) ? storage_ : 0),
        flushes_(product_ > 0 || std::abs(p_.scale) >= 0x1p-64) {}

 protected:
  using Numbers = std::vector<double>;
  static size_t at2(int64_t row, int64_t cols, int64_t col) { return size_t(row * cols + col); }

  // One (batch, head) matrix of a tensor, row-major; zeros if it is absent.
  Numbers matrix(const TensorView& view, int64_t batch, int64_t head, int64_t rows, int64_t cols) const {
    Numbers result(size_t(rows * cols), 0.0);
    const double* data = element_ptr<double>(p_, view, batch, head);
    for (int64_t i = 0; data && i < rows; ++i)
      for (int64_t d = 0; d < cols; ++d) result[at2(i, cols, d)] = data[i * view.row_stride + d * view.col_stride];
    return result;
  }

  // A key, for one row.
  struct Seen {
    uint8_t state;
    double score, error;           // score and its variance
    double slope, slope_error;     // d score / d (scale * dot product)
    double probability, relative;  // P, and the variance of its relative error without the row's
    double weight;                 // after dropout
    double factor;                 // weight / P
  };
  // Variances of a row: relative, of the sum of exponentials and of P computed from lse; of lse itself.
  struct Row {
    double sum, shift;
  };

  // One query head's tensors and those of its keys.
  struct Head {
    int64_t batch, head;
    Numbers query, key, value, grad_output, grad_lse, grad_weights;
  };

  // Whether a stored number is a score exactly: kernels do not round it, and all other terms and their errors, at most
  // `rest` together, vanish beside it.
  bool is_all(double bias, double rest) const {
    const double size = std::abs(bias);
    const bool rounded = !computes_double_ && double(float(bias)) != bias;  // a float64 mask
    return !rounded && size > 0 && size + rest == size && size - rest == size;
  }

  void score(const Head& h, int64_t i, int64_t j, double additive, Seen& seen) const {
    Sum dot;
    for (int64_t d = 0; d < p_.head_dim; ++d) dot.add(h.query[at2(i, p_.head_dim, d)] * h.key[at2(j, p_.head_dim, d)]);
    const double x = dot.sum * p_.scale;
    seen.score = x, seen.slope = 1, seen.slope_error = 0;
    seen.error = square(p_.scale) * dot.variance(double(p_.head_dim), compute_) + 2 * compute_ * square(x);
    if (!std::isfinite(x)) seen.error = 0;
    if (p_.softcap > 0) {
      seen.score = capped(x, p_.softcap), seen.slope = capped_slope(seen.score, p_.softcap);
      seen.error = square(seen.slope) * seen.error + kFunction * compute_ * square(seen.score);
      seen.slope_error = square(2 * seen.score / square(p_.softcap)) * seen.error + 2 * compute_;
    }
    if (mask_use(p_).additive) {
      const double slope = p_.alibi_slopes.data ? *element_ptr<double>(p_, p_.alibi_slopes, h.batch, h.head) : 0;
      const double alibi = slope * std::abs(double(j - i - p_.position.diagonal));
      double relative = 0;  // added to alibi, and then the mask to their sum
      if (p_.relative_bias.data) add_relative_bias(p_, h.batch, h.head, j - i - p_.position.diagonal, 1, &relative);
      const double mask = adds_mask(p_)
                              ? element_ptr<double>(p_, p_.attn_mask, h.batch,
                                                    h.head)[i * p_.attn_mask.row_stride + j * p_.attn_mask.col_stride]
                              : 0;
      const double rest = std::abs(seen.score) + kDeviations * std::sqrt(seen.error) + std::abs(alibi);
      const double partial = p_.relative_bias.data ? relative - alibi : 0;
      seen.score += additive;
      seen.error =
          is_all(mask, rest + std::abs(relative)) || is_all(relative, rest + std::abs(mask))
              ? 0
              : seen.error + compute_ * (2 * square(alibi) + square(partial) + square(additive) + square(seen.score));
    }
    if (seen.state == kReplaced) seen.score = p_.masked_score, seen.error = seen.slope = seen.slope_error = 0;
    if (!std::isfinite(seen.score)) seen.error = 0;
  }

  // Fills `seen` and the row's limits of output, lse and weights.
  Row forward_row(const Head& h, int64_t i, std::vector<Seen>& seen) {
    Numbers additive(size_t(p_.key_length), 0.0);
    std::vector<uint8_t> state(static_cast<size_t>(p_.key_length));
    row_terms<double>(p_, h.batch, h.head, i, {0, p_.key_length}, additive.data(), state.data());
    const DropoutRow stream = p_.dropout_p > 0 ? dropout_row(p_, h.batch, h.head, i) : DropoutRow{};
    double maximum = -kInfinity, maximum_error = 0, live = 0;
    for (int64_t j = 0; j < p_.key_length; ++j) {
      Seen& s = seen[size_t(j)];
      s = {};
      s.state = state[size_t(j)];
      s.factor = p_.dropout_p > 0 ? (dropout_keeps(stream, j) ? keep_scale_ : 0) : 1;
      if (s.state == kMasked) continue;
      score(h, i, j, additive[size_t(j)], s);
      ++live;
      // The difference of two equal exact scores (of masked_score, for example) is exact.
      if (s.score > maximum) maximum = s.score, maximum_error = s.error > 0 ? compute_ * square(s.score) : 0;
    }
    maximum = shift(maximum);
    Sum exponentials;
    for (Seen& s : seen)
      if (s.state != kMasked) exponentials.add(s.probability = std::exp(s.score - maximum));
    const double total = exponentials.sum;
    const bool empty = total == 0;  // all results are exactly 0
    Row row = {};
    std::map<double, double> alike;  // by score: errors of equal scores and of their exponentials are the same
    for (Seen& s : seen) {
      if (s.state == kMasked) continue;
      s.probability = empty ? 0 : s.probability / total;
      s.weight = s.factor == 0 ? s.probability * 0 : s.probability * s.factor;  // NaN stays NaN
      if (s.probability == 0) continue;
      const double rounded_score = s.error > 0 ? square(s.score) : 0;
      s.relative = s.error + compute_ * (kFunction + square(s.score - maximum) + rounded_score);
      if (s.probability < smallest_operand_) s.relative += 1;
      alike[std::isnan(s.score) ? 0 : s.score] += s.probability * std::sqrt(s.relative);  // NaN makes all of them NaN
    }
    for (const auto& [score, error] : alike) row.sum += square(error);
    row.sum += compute_ * (exponentials.additions(live) + 4);
    const double log_sum = empty ? 0 : std::log(total), lse = maximum + log_sum;
    const double lse_error = row.sum + maximum_error + compute_ * (kFunction + square(log_sum));
    // A part has nothing but the rounded lse. Other kernels need not round the lse of exact scores.
    row.shift = lse_error + (maximum_error > 0 || p_.part.given ? compute_ * square(lse) : 0);
    limits_.lse.push_back(lse_error);
    for (const Seen& s : seen)
      limits_.weights.push_back(s.state == kMasked ? 0 : square(s.weight) * (s.relative + row.sum + 4 * compute_));
    output_.clear();
    const int64_t kv_head = h.head / (p_.heads / p_.kv_heads);
    const double lost = lost_terms(live, value_power_ * keep_scale_ * cache_scale(p_, value_scale_, h.batch, kv_head));
    for (int64_t d = 0; d < p_.value_dim; ++d) {
      Sum output;
      double variance = 0;
      for (int64_t j = 0; j < p_.key_length; ++j) {
        const Seen& s = seen[size_t(j)];
        if (s.state == kMasked) continue;
        const double term = s.weight * h.value[at2(j, p_.value_dim, d)];
        output.add(term);
        variance += square(term) * (s.relative + product_);
      }
      limits_.output.push_back(variance + lost + output.variance(live, compute_) +
                               square(output.sum) * (row.sum + product_ + 4 * compute_));
      output_.push_back(output.sum);
    }
    return row;
  }

  // Variance of a sum of `count` terms that is multiplied by `factor`, if it becomes 0 after each addition: all that is
  // lost may have one sign. None with a factor that is not finite: the result is 0 or NaN.
  double lost_terms(double count, double factor) const {
    return flushes_ && std::isfinite(factor) ? variance_of_bound(count * factor * smallest_operand_ / 2) : 0;
  }

  const Built& wide_;
  const Problem p_;
  const TensorView value_scale_;
  const double value_power_;
  const double keep_scale_;
  const bool computes_double_;
  const double compute_, storage_, stored_;  // variance of one rounding; of a result's; of a result's near 0
  const double smallest_operand_, product_;  // product_: variance of rounding P and dS before a product
  const bool flushes_;                       // sums and gradients of scores may become 0
  Numbers output_;                           // of the row at hand
  Limits limits_;
};

}  // namespace scaledot::testing
