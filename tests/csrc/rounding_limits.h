// Limits of a kernel's errors: the formulas of tests/reference/reference.cpp, together with the variance of the
// unavoidable rounding errors, to first order, for each element.
//
// A rounding to a format of unit roundoff u multiplies by 1 + e with |e| <= u, and counts as variance u^2 / 3. Errors
// add up in squares (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019), except where
// they are one and the same error:
//   of a row        the errors of its maximum, its sum, its lse and its delta reach all elements of the row
//   equal numbers   (rows of equal scores) round alike: that part grows with the sum itself, not with its terms. So do
//                   their exponentials, and equal outputs or weights of a row or several, from which delta comes
//   equal terms     a sum of n equal terms t has rounded alike in each addition between two powers of 2: by n/3 u n t,
//                   at most
//   nearly equal    numbers that round to one or two neighbours in bfloat16: the error may follow what they are
//                   multiplied with, as that of dS = P dLse follows the key of which P is made
// A kernel may round:
//   everything it computes, in the compute type: float32, or float64 for float64
//   results, in their dtype; delta comes from such a rounded output
//   bfloat16: weights and gradients of scores once more, to bfloat16, before they are multiplied with value,
//   grad_output, key and query, as eager torch does (operands of a bfloat16 matrix product); a kernel on tensor cores
//   rounds float16 in the same way
//   weights below the smallest normal number of float32 (float64 for float64), to 0; twice that counts as below here,
//   because the weight has an error itself. The same for gradients of scores, unless the scale is tiny
//   a sum of products below that number, to 0, after each addition (FlushSubnormals; vdpbf16ps). A factor that
//   multiplies the sum (of dropout, v_scale, scale) makes that visible
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "core/philox.h"
#include "core/softmax.h"
#include "problem_builder.h"

namespace scaledot::testing {

// Largest relative error of one rounding.
inline double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::float64: return 0x1p-53;
    case DType::float32: return 0x1p-24;
    case DType::float16: return 0x1p-11;
    default: return 0x1p-8;
  }
}
// Half the distance of the numbers next to 0: the largest error of one rounding there.
inline double half_smallest(DType dtype) {
  switch (dtype) {
    case DType::float64: return 0;  // the numbers of the tests do not come near
    case DType::float16: return 0x1p-25;
    case DType::bfloat16: return 0x1p-134;
    default: return 0x1p-150;
  }
}
inline double square(double x) { return x * x; }
inline double variance_of(double unit) { return square(unit) / 3; }

// The largest error, in standard deviations. The tests and the fuzzer compare some 10^10 numbers. One in 10^10 of a
// normal distribution is beyond 6.5.
constexpr double kDeviations = 6.5;
// The variance whose limit is `bound`, for errors that may be as large as that.
inline double variance_of_bound(double bound) { return square(bound / kDeviations); }
// Variance of a library function (exp, tanh, log), in roundings: its error may be 3 units.
constexpr double kFunction = 9;

// The largest error of each element of a result, without the rounding to the result's dtype.
struct Limits {
  std::vector<double> output, lse, weights, grad_query, grad_key, grad_value, grad_mask, grad_relative_bias;
};

// The sum of terms[k] is made by `count` additions in any order. A partial sum of a part f of the terms is about
// sqrt(f sum of squares) + f sum. A run of r equal terms adds up to r / 3 units of error, at most. Powers of 2 add up
// without one.
struct Sum {
  static constexpr double kEqual = 0x1p-40;  // relative difference of terms that are equal but for the oracle's errors
  double sum = 0, squares = 0;
  static constexpr double kLongRun = 16;  // from here on, the errors of runs may all have one sign
  double last = 0, run = 0, runs = 0;     // runs: the sum of r^2
  double in_long_runs = 0;                // the sum of r
  void add(double term) {
    sum += term, squares += square(term);
    int exponent;
    const bool equal = std::abs(term - last) <= kEqual * std::abs(term);
    run = equal && std::abs(std::frexp(term, &exponent)) != 0.5 ? run + 1 : 1;
    last = term, runs += 2 * run - 1;
    if (run >= kLongRun) in_long_runs += run == kLongRun ? run : 1;
  }
  // By how much the variance is larger if all terms have one relative error, in units of that error's variance.
  double excess() const { return max(square(sum) - squares, 0.); }
  // Variances of the roundings of partial sums, in units of the square of the sum.
  double additions(double count) const {
    return max(count / 3, max(runs, square(in_long_runs)) * variance_of_bound(1. / 3) / variance_of(1));
  }
  double variance(double count, double rounding) const {
    return rounding * (count * squares / 2 + additions(count) * square(sum));
  }
};

class RoundingAnalysis {
 public:
  // `wide` is the problem with its gradients in float64; limits are for results of `dtype`. `cache`: the type of a
  // quantised cache, with its v_scale, by which `wide` has multiplied V. `tensor_cores`: float16 weights are rounded
  // before products too.
  RoundingAnalysis(const Built& wide, DType dtype, DType cache = DType::none, const TensorView& value_scale = {},
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

  // `backward`: also those of gradients.
  Limits limits(bool backward = true) {
    backward_ = backward;
    if (p_.grad_mask.data) mask_.resize(size_t(mask_extent()));
    if (p_.grad_relative_bias.data) relative_.resize(size_t(wide_.grad_relative_bias.count()));
    for (int64_t batch = 0; batch < p_.batch; ++batch)
      for (int64_t kv_head = 0; kv_head < p_.kv_heads; ++kv_head) run_plane(batch, kv_head);
    if (!mask_.empty())
      wide_.grad_mask.for_each(
          [&](int64_t, int64_t index) { limits_.grad_mask.push_back(variance_of_shared(mask_[size_t(index)])); });
    for (const SharedElement& e : relative_) limits_.grad_relative_bias.push_back(variance_of_shared(e));
    for (std::vector<double>* variances :
         {&limits_.output, &limits_.lse, &limits_.weights, &limits_.grad_query, &limits_.grad_key, &limits_.grad_value,
          &limits_.grad_mask, &limits_.grad_relative_bias})
      for (double& x : *variances) x = kDeviations * std::sqrt(x);
    return limits_;
  }

 private:
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

  // dP before it is multiplied by the dropout factor.
  double grad_weight(const Head& h, int64_t i, int64_t j, double* error) const {
    Sum dot;
    for (int64_t d = 0; d < p_.value_dim; ++d)
      dot.add(h.grad_output[at2(i, p_.value_dim, d)] * h.value[at2(j, p_.value_dim, d)]);
    const double result = dot.sum + h.grad_weights[at2(i, p_.key_length, j)];
    *error =
        dot.variance(double(p_.value_dim), compute_) + compute_ * square(result) + lost_terms(double(p_.value_dim), 1);
    return result;
  }

  // delta = sum_d dO O + sum_j dW W - dlse, whose O and W were rounded to their type. O has the errors of weights that
  // were rounded before the product with V: e_j of weight j changes delta by e_j W_j sum_d dO_d V_jd. Or, the same
  // number, the sum of P dP less dlse, as the backward of torch's softmax has it: then the errors of P and dP reach it.
  struct Delta {
    double variance;
    double stored;  // what was made of rounded numbers
  };
  Delta delta_error(const Head& h, int64_t i, const std::vector<Seen>& seen, const Numbers& grad,
                    const Numbers& grad_error, const Row& row, double delta) const {
    Sum from_output, from_weights, from_scores;
    for (int64_t d = 0; d < p_.value_dim; ++d)
      from_output.add(output_[size_t(d)] * h.grad_output[at2(i, p_.value_dim, d)]);
    double variance = compute_ * (square(delta) + square(h.grad_lse[size_t(i)])) + square(delta) * row.sum;
    double factors = 0;           // squares of what is multiplied with a stored number
    double operands = 0;          // squares of the terms of sum_d dO O, a term for each key
    std::map<double, Sum> alike;  // by stored number: its products
    const auto multiply = [&](double stored, double factor) {
      factors += square(factor);
      alike[std::isnan(stored) ? 0 : stored].add(stored * factor);
    };
    for (int64_t d = 0; d < p_.value_dim; ++d) multiply(output_[size_t(d)], h.grad_output[at2(i, p_.value_dim, d)]);
    for (int64_t j = 0; j < p_.key_length; ++j) {
      const Seen& s = seen[size_t(j)];
      if (s.state == kMasked) continue;
      const double of_weight = s.weight * h.grad_weights[at2(i, p_.key_length, j)];
      from_weights.add(of_weight);
      operands += square(s.probability * grad[size_t(j)] - of_weight);
      multiply(s.weight, h.grad_weights[at2(i, p_.key_length, j)]);
      from_scores.add(s.probability * grad[size_t(j)]);
      variance += square(s.probability) * (square(grad[size_t(j)]) * s.relative + grad_error[size_t(j)]);
    }
    for (const auto& [stored, products] : alike) variance += storage_ * max(products.squares, square(products.sum));
    if (product_ > 0) variance += product_ * (operands + square(from_output.sum));
    variance +=
        stored_ * factors + lost_terms(double(p_.value_dim), 1) + from_output.variance(double(p_.value_dim), compute_) +
        from_weights.variance(double(p_.key_length), compute_) + from_scores.variance(double(p_.key_length), compute_);
    return {variance, from_output.sum + from_weights.sum};
  }

  // Variances and sums of grad_key and grad_value of one KV group.
  struct Columns {
    Numbers variance;
    std::vector<Sum> sums;
    explicit Columns(int64_t count) : variance(size_t(count), 0.0), sums(static_cast<size_t>(count)) {}
    void add(size_t k, double term, double relative) {
      sums[k].add(term);
      variance[k] += square(term) * relative;
    }
  };

  void backward_row(const Head& h, int64_t i, const std::vector<Seen>& seen, const Row& row, Columns& keys,
                    Columns& values) {
    const int64_t n = p_.key_length;
    Numbers grad(size_t(n), 0.0), grad_error(size_t(n), 0.0);
    double delta = -h.grad_lse[size_t(i)];
    for (int64_t j = 0; j < n; ++j) {
      const Seen& s = seen[size_t(j)];
      if (s.state == kMasked) continue;
      grad[size_t(j)] = s.factor == 0 ? 0 : s.factor * grad_weight(h, i, j, &grad_error[size_t(j)]);
      grad_error[size_t(j)] = square(s.factor) * grad_error[size_t(j)] + 2 * compute_ * square(grad[size_t(j)]);
      delta += s.probability * grad[size_t(j)];
    }
    const Delta of_delta = delta_error(h, i, seen, grad, grad_error, row, delta);
    // dS = P (dP - delta), with the variance of its errors, and the two errors of the row.
    std::vector<Sum> query(static_cast<size_t>(p_.head_dim));
    Numbers own(size_t(p_.head_dim), 0.0), by_delta(size_t(p_.head_dim), 0.0);
    const bool one_element = !p_.grad_mask.col_stride;  // of the mask, for the whole row
    double live = 0, all_grads = 0, all_probabilities = 0;
    std::map<double, std::vector<int64_t>> alike;  // keys, by dX as an operand
    Numbers all_dx(size_t(product_ > 0 ? n : 0), 0.0), all_ds(size_t(n), 0.0);
    for (int64_t j = 0; j < n; ++j) {
      const Seen& s = seen[size_t(j)];
      if (s.state == kMasked) continue;
      ++live;
      const double difference = grad[size_t(j)] - delta, ds = s.probability * difference;
      const double ds_error =
          square(s.probability) * ((square(difference) + of_delta.variance) * (s.relative + 2 * compute_) +
                                   grad_error[size_t(j)] + compute_ * (square(grad[size_t(j)]) + square(delta)));
      all_grads += ds, all_probabilities += s.probability, all_ds[size_t(j)] = ds;
      if (!mask_.empty()) {
        SharedElement& m = mask_element(h, i, j);
        m.sum.add(ds), ++m.count;
        m.variance += ds_error;
        if (!one_element) m.add_row(ds, s.probability, row.shift, of_delta);
      }
      if (!relative_.empty() && s.state == kLive) add_to_relative(h, i, j, ds, s.probability, ds_error);
      for (int64_t d = 0; d < p_.value_dim; ++d)
        values.add(at2(j, p_.value_dim, d), s.weight * h.grad_output[at2(i, p_.value_dim, d)],
                   s.relative + row.shift + product_ + 2 * compute_);
      if (s.state != kLive) continue;
      const double dx = ds * s.slope, by_row = s.probability * s.slope;
      const double lost = flushes_ && std::abs(dx) < smallest_operand_ ? 1 : 0;
      // The rounded number has the error of delta already, which matters where dX is 0.
      const double rounded = square(dx) + square(by_row) * of_delta.variance;
      const double dx_error =
          square(s.slope) * ds_error + square(ds) * s.slope_error + rounded * (product_ + 3 * compute_ + lost);
      if (product_ > 0 && std::isfinite(dx)) alike[as_operand(dx)].push_back(j), all_dx[size_t(j)] = dx;
      const double key_error = dx_error + square(dx) * row.shift + square(by_row) * of_delta.variance;
      for (int64_t d = 0; d < p_.head_dim; ++d) {
        const double q = h.query[at2(i, p_.head_dim, d)], k = h.key[at2(j, p_.head_dim, d)];
        keys.sums[at2(j, p_.head_dim, d)].add(dx * q);
        keys.variance[at2(j, p_.head_dim, d)] += key_error * square(q);
        query[size_t(d)].add(dx * k);
        own[size_t(d)] += dx_error * square(k);
        by_delta[size_t(d)] += by_row * k;
      }
    }
    if (!mask_.empty() && one_element && n > 0)
      mask_element(h, i, 0).add_row(all_grads, all_probabilities, row.shift, of_delta);
    for (const auto& [rounded, members] : alike) add_nearly_equal(h, members, all_dx, own);
    if (product_ > 0) add_shared_key(h, all_dx, own);
    add_equal_scores(h, i, seen, all_ds, own);
    end_relative_row(row.shift, of_delta);
    for (size_t d = 0; d < query.size() && wide_.grad_query.present(); ++d)
      limits_.grad_query.push_back(lost_terms(live, p_.scale) +
                                   square(p_.scale) * (own[d] + query[d].variance(live, compute_) +
                                                       square(query[d].sum) * (row.shift + product_ + 4 * compute_) +
                                                       square(by_delta[d]) * of_delta.variance));
  }

  // Equal scores of a row have one error of P and one of the slope, which reach the sum of their terms. This adds
  // the difference to errors that were counted as independent of each other.
  void add_equal_scores(const Head& h, int64_t i, const std::vector<Seen>& seen, const Numbers& ds, Numbers& variance) {
    std::vector<int64_t> keys;
    for (int64_t j = 0; j < p_.key_length; ++j)
      if (seen[size_t(j)].state != kMasked && seen[size_t(j)].probability > 0) keys.push_back(j);
    const auto score_of = [&](int64_t j) { return seen[size_t(j)].score; };
    std::sort(keys.begin(), keys.end(), [&](int64_t a, int64_t b) { return score_of(a) < score_of(b); });
    for (size_t begin = 0, end; begin < keys.size(); begin = end) {
      for (end = begin + 1; end < keys.size() && score_of(keys[end]) == score_of(keys[begin]);) ++end;
      if (end - begin > 1) add_equal_scores(h, i, seen, ds, {keys.begin() + begin, keys.begin() + end}, variance);
    }
  }
  void add_equal_scores(const Head& h, int64_t i, const std::vector<Seen>& seen, const Numbers& ds,
                        const std::vector<int64_t>& keys, Numbers& variance) {
    const Seen& s = seen[size_t(keys[0])];
    const double of_gradient = s.relative + 2 * compute_;
    for (int64_t d = 0; d < p_.head_dim && s.state == kLive; ++d) {
      Sum sum;
      for (int64_t j : keys) sum.add(ds[size_t(j)] * h.key[at2(j, p_.head_dim, d)]);
      variance[size_t(d)] += sum.excess() * (square(s.slope) * of_gradient + s.slope_error);
    }
    if (mask_.empty() && relative_.empty()) return;
    std::map<SharedElement*, Sum> shared;
    for (int64_t j : keys) {
      if (!mask_.empty()) shared[&mask_element(h, i, j)].add(ds[size_t(j)]);
      if (!relative_.empty() && s.state == kLive) shared[&relative_element(h, i, j)].add(ds[size_t(j)]);
    }
    for (const auto& [element, sum] : shared) element->variance += sum.excess() * of_gradient;
  }

  // Where keys share a vector c, the kernels add c times the rounding errors of dX to dQ (cpu/simd/attention/
  // shared_key.h). An element of a key that is smaller than that of c then has the larger one's error.
  void add_shared_key(const Head& h, const Numbers& dx, Numbers& variance) const {
    constexpr double kLeast = 0.8;  // the kernels' 0.9 is of some of the keys
    const int64_t n = p_.key_length;
    Numbers mean(size_t(p_.head_dim), 0.0);
    double squares = 0, of_mean = 0, errors = 0;
    for (int64_t j = 0; j < n; ++j)
      for (int64_t d = 0; d < p_.head_dim; ++d) {
        const double k = h.key[at2(j, p_.head_dim, d)];
        mean[size_t(d)] += k / double(n), squares += square(k);
      }
    for (double c : mean) of_mean += square(c) * double(n);
    if (!(of_mean > kLeast * squares)) return;
    for (double x : dx) errors += product_ * square(x);
    for (size_t d = 0; d < mean.size(); ++d) variance[d] += errors * square(mean[d]);
  }

  double as_operand(double x) const {
    const double unit = std::sqrt(3 * product_);
    int exponent;
    const double fraction = std::frexp(x, &exponent);
    return std::ldexp(std::nearbyint(fraction / unit) * unit, exponent);
  }
  // dX of these keys is one number as an operand. With a neighbour of it they may be twice as many.
  void add_nearly_equal(const Head& h, const std::vector<int64_t>& keys, const Numbers& dx, Numbers& variance) const {
    for (int64_t d = 0; d < p_.head_dim; ++d) {
      double bound = 0, counted = 0;
      for (int64_t j : keys) {
        const double term = std::abs(dx[size_t(j)] * h.key[at2(j, p_.head_dim, d)]);
        bound += term, counted += product_ * square(term);
      }
      variance[size_t(d)] += std::max(0., 2 * variance_of_bound(std::sqrt(3 * product_) * bound) - counted);
    }
  }

  // An element of a gradient that several scores share.
  struct SharedElement {
    Sum sum;
    double count = 0, variance = 0;
    double row_sum = 0, row_probability = 0;  // of the row at hand, whose errors reach all its scores
    std::map<double, double> alike;           // rows whose delta is of the same rounded numbers: their probabilities
    double shift = 0, of_shift = 0;           // rows of one lse, whose rounding is one error: its variance, their sum

    void add_row(double grad, double probability, double row_shift, const Delta& of_delta) {
      if (row_shift != shift) end_shift(row_shift);
      of_shift += grad;
      variance += square(probability) * of_delta.variance;
      if (std::isfinite(of_delta.stored)) alike[of_delta.stored] += probability;
    }
    void end_shift(double next) {
      variance += square(of_shift) * shift;
      shift = next, of_shift = 0;
    }
  };
  double variance_of_shared(const SharedElement& e) const {
    double variance =
        e.variance + square(e.of_shift) * e.shift + e.sum.variance(e.count, compute_) + lost_terms(e.count, 1);
    for (const auto& [stored, probability] : e.alike) variance += storage_ * square(stored * probability);
    return variance;
  }

  // Elements of grad_relative_bias are contiguous.
  SharedElement& relative_element(const Head& h, int64_t i, int64_t j) {
    const auto [low, high] = p_.relative_range;
    const int64_t entry = min(max(j - i - p_.position.diagonal, low), high) - low;
    return relative_[size_t(offset(p_, p_.grad_relative_bias, h.batch, h.head) + entry)];
  }
  void add_to_relative(const Head& h, int64_t i, int64_t j, double ds, double probability, double error) {
    SharedElement& e = relative_element(h, i, j);
    e.sum.add(ds), ++e.count;
    e.variance += error;
    e.row_sum += ds, e.row_probability += probability;
  }
  void end_relative_row(double of_shift, const Delta& of_delta) {
    for (SharedElement& e : relative_) {
      if (e.row_sum == 0 && e.row_probability == 0) continue;  // errors of the row, NaN too, do not reach it
      e.add_row(e.row_sum, e.row_probability, of_shift, of_delta);
      e.row_sum = e.row_probability = 0;
    }
  }

  int64_t mask_extent() const {
    const TensorView& m = p_.grad_mask;
    int64_t last = max<int64_t>(p_.heads - 1, 0) * m.head_stride + max<int64_t>(p_.query_length - 1, 0) * m.row_stride +
                   max<int64_t>(p_.key_length - 1, 0) * m.col_stride;
    for (int d = 0; d < p_.batch_dims; ++d) last += max<int64_t>(p_.batch_sizes[d] - 1, 0) * m.batch_stride[d];
    return last + 1;
  }
  // An element of grad_mask, by its offset in memory.
  SharedElement& mask_element(const Head& h, int64_t i, int64_t j) {
    const TensorView& m = p_.grad_mask;
    return mask_[size_t(offset(p_, m, h.batch, h.head) + i * m.row_stride + j * m.col_stride)];
  }

  void run_plane(int64_t batch, int64_t kv_head) {
    const int64_t group = p_.heads / p_.kv_heads, rows = p_.query_length;
    Columns keys(p_.key_length * p_.head_dim), values(p_.key_length * p_.value_dim);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const Head h = {batch,
                      head,
                      matrix(p_.query, batch, head, rows, p_.head_dim),
                      matrix(p_.key, batch, kv_head, p_.key_length, p_.head_dim),
                      matrix(p_.value, batch, kv_head, p_.key_length, p_.value_dim),
                      matrix(p_.grad_output, batch, head, rows, p_.value_dim),
                      matrix(p_.grad_lse, batch, head, rows, 1),
                      matrix(p_.grad_weights, batch, head, rows, p_.key_length)};
      std::vector<Seen> seen(static_cast<size_t>(p_.key_length));
      for (int64_t i = 0; i < rows; ++i) {
        const Row row = forward_row(h, i, seen);
        if (backward_) backward_row(h, i, seen, row, keys, values);
      }
    }
    const double terms = double(group * rows);
    const auto finish = [&](Columns& columns, double factor, double lost, const TestTensor& result, Numbers& to) {
      for (size_t k = 0; k < columns.sums.size() && result.present(); ++k)
        to.push_back(lost + square(factor) * (columns.variance[k] + columns.sums[k].variance(terms, compute_) +
                                              square(columns.sums[k].sum) * (product_ + 4 * compute_)));
    };
    finish(keys, p_.scale, lost_terms(terms, p_.scale), wide_.grad_key, limits_.grad_key);
    finish(values, 1, lost_terms(terms, keep_scale_), wide_.grad_value, limits_.grad_value);
  }

  const Built& wide_;
  const Problem p_;
  const TensorView value_scale_;
  const double value_power_;
  bool backward_ = true;
  const double keep_scale_;
  const bool computes_double_;
  const double compute_, storage_, stored_;  // variance of one rounding; of a result's; of a result's near 0
  const double smallest_operand_, product_;  // product_: variance of rounding P and dS before a product
  const bool flushes_;                       // sums and gradients of scores may become 0
  Numbers output_;                           // of the row at hand
  std::vector<SharedElement> mask_, relative_;
  Limits limits_;
};

}  // namespace scaledot::testing
