// Limits of a kernel's errors: the formulas of tests/reference/reference.cpp, together with the variance of the
// unavoidable rounding errors, to first order, for each element. rounding_forward.h computes those of the forward.
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
//   because the weight has an error itself. So are gradients of scores, unless the scale is tiny
//   a sum of products below that number, to 0, after each addition (FlushSubnormals; vdpbf16ps). A factor that
//   multiplies the sum (of dropout, v_scale, scale) makes that visible
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "rounding_forward.h"

namespace scaledot::testing {

class RoundingAnalysis : RoundingOfForward {
 public:
  using RoundingOfForward::RoundingOfForward;

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

  bool backward_ = true;
  std::vector<SharedElement> mask_, relative_;
};

}  // namespace scaledot::testing
