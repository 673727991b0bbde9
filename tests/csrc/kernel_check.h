// Runs one kernel on one case and compares every result with the reference kernel's in float64.
//
// The limits are first-order error bounds of the formulas in csrc/cpu/reference.cpp, with u the rounding unit of the
// compute type (float32, or float64 for float64) and u_s that of the storage type:
//   a score s is off by u |q| |k| scale, so a weight is off by the factor 1 + a u,
//       a = 4 + max |q| |k| scale + max |bias| + max |lse|
//   dS = P (dP - delta) is off by P (2 a u max |dP| + u_s max |dO| |O|): the backward takes delta from the rounded O
//   sums over keys or rows add the errors of their terms, each weighed by P
// and every result is rounded once more to its own dtype.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "executors.h"
#include "problem_builder.h"

namespace scaledot::testing {

inline const Kernel& kernel_by_name(const std::string& name) {
  const KernelTable table = cpu_kernels();
  for (int k = 0; k < table.count; ++k)
    if (name == table.kernels[k].name) return table.kernels[k];
  throw std::runtime_error("no kernel " + name);
}

inline double unit(DType dtype) {
  switch (dtype) {
    case DType::float64: return 0x1p-52;
    case DType::float32: return 0x1p-23;
    case DType::float16: return 0x1p-10;
    default: return 0x1p-7;
  }
}
inline double smallest(DType dtype) { return dtype == DType::float16 ? 0x1p-24 : 1e-37; }

inline double largest(const std::vector<double>& values) {
  double result = 0;
  for (double x : values)
    if (std::isfinite(x)) result = larger(result, std::abs(x));
  return result;
}

// The largest Euclidean norm of a row.
inline double largest_norm(const std::vector<double>& values, int64_t cols) {
  double result = 0;
  for (size_t start = 0; cols > 0 && start + size_t(cols) <= values.size(); start += size_t(cols)) {
    double square = 0;
    for (int64_t d = 0; d < cols; ++d) square += values[start + size_t(d)] * values[start + size_t(d)];
    if (std::isfinite(square)) result = larger(result, std::sqrt(square));
  }
  return result;
}

struct Limits {
  double output, lse, weights, grad_query, grad_key, grad_value, grad_mask;
  double column;  // the largest sum of P over what a row of grad_key is a sum over
};

// Rows whose scores are all masked_score do not count: those scores are exact.
inline double largest_lse(const Built& wide) {
  std::vector<double> lse = wide.lse.values();
  for (double& x : lse)
    if (x < wide.c.masked_score / 2 && wide.c.masked_score < -1e4) x = 0;
  return largest(lse);
}

// `wide` has run forward; its tensors hold the oracle's results.
inline Limits limits(const Built& b, const Built& wide, bool backward) {
  const Problem p = wide.problem();
  const DType compute = lse_dtype(b.c.dtype);
  const double u = unit(compute) * (compute == DType::float64 ? 4 : 1), u_s = unit(b.c.dtype);
  const double scale = std::abs(p.scale), kept = 1 / (1 - p.dropout_p);
  const double query = largest_norm(wide.query.values(), p.head_dim), key = largest_norm(wide.key.values(), p.head_dim);
  const double value = largest_norm(wide.value.values(), p.value_dim);
  const double bias =
      (wide.attn_mask.present() && wide.attn_mask.dtype() != DType::boolean ? largest(wide.attn_mask.values()) : 0) +
      largest(wide.alibi_slopes.values()) * double(p.key_length + p.query_length);
  const double dot = query * key * scale;
  const double a = 4 + (p.softcap > 0 ? 2 * smaller(dot, 4 * p.softcap) : dot) + bias + largest_lse(wide);
  Limits l = {};
  l.output = u * a * largest(wide.value.values()) * kept;
  l.lse = u * a;
  l.weights = u * a * kept;
  if (!backward) return l;

  // Without dropout the weights are P. `column` and `element`: the largest sum of P over what a row of grad_key and an
  // element of grad_mask are sums over.
  Built plain = wide;
  plain.c.dropout_p = 0;
  plain.weights = TestTensor(DType::float64, b.c.batch, p.heads, p.query_length, p.key_length);
  run(kernel_by_name("reference"), plain.problem(), Pass::forward);
  const std::vector<double> probability = plain.weights.values();
  std::vector<double> columns(static_cast<size_t>(p.batch * p.kv_heads * p.key_length), 0.0);
  const int64_t group = p.heads / p.kv_heads;
  for (int64_t k = 0; k < int64_t(probability.size()); ++k) {
    const int64_t plane = k / (p.query_length * p.key_length);
    if (std::isfinite(probability[size_t(k)]))
      columns[size_t(plane / group * p.key_length + k % p.key_length)] += probability[size_t(k)];
  }
  const double column = l.column = larger(largest(columns), 1.0);
  double element = 1;
  if (b.grad_mask.present()) {
    TestTensor sums(DType::float64, b.c.batch, p.heads, p.query_length, p.key_length, MemoryOrder::contiguous,
                    b.c.mask_broadcast);
    const TensorView view = sums.view();
    double* data = static_cast<double*>(view.data);
    sums.for_each([&](int64_t, int64_t index) { data[index] = 0; });
    for (int64_t k = 0; k < int64_t(probability.size()); ++k) {
      const int64_t plane = k / (p.query_length * p.key_length), within = k % (p.query_length * p.key_length);
      if (std::isfinite(probability[size_t(k)]))
        data[offset(p, view, plane / p.heads, plane % p.heads) + within / p.key_length * view.row_stride +
             within % p.key_length * view.col_stride] += probability[size_t(k)];
    }
    element = larger(element, largest(sums.values()));
  }
  const double grad_output = largest_norm(wide.grad_output.values(), p.value_dim);
  const double grad_probability = kept * (grad_output * value + largest(wide.grad_weights.values()));
  const double grad_score = 2 * a * u * (grad_probability + largest(wide.grad_lse.values())) + u_s * grad_probability;
  l.grad_query = scale * grad_score * largest(wide.key.values());
  l.grad_key = scale * grad_score * largest(wide.query.values()) * column;
  l.grad_value = 2 * u * a * kept * largest(wide.grad_output.values()) * column;
  l.grad_mask = grad_score * element;
  return l;
}

// At most `limit` and one rounding off, and non-finite exactly where the oracle is.
inline void expect_close(const char* name, const TestTensor& found, const TestTensor& oracle, double limit) {
  if (!found.present()) return;
  EXPECT_TRUE(found.intact()) << name << ": something around the tensor was written to";
  const std::vector<double> x = found.values(), y = oracle.values();
  ASSERT_EQ(x.size(), y.size()) << name;
  size_t wrong = 0, worst = 0;
  double worst_ratio = 0;
  for (size_t k = 0; k < x.size(); ++k) {
    const double allowed = limit + 0.5001 * unit(found.dtype()) * std::abs(y[k]) + smallest(found.dtype());
    const bool both_finite = std::isfinite(x[k]) && std::isfinite(y[k]);
    const double ratio = both_finite ? std::abs(x[k] - y[k]) / allowed
                         : std::isfinite(x[k]) == std::isfinite(y[k]) && std::isnan(x[k]) == std::isnan(y[k])
                             ? 0.0
                             : kInfinity;
    wrong += ratio > 1;
    if (ratio > worst_ratio) worst_ratio = ratio, worst = k;
  }
  EXPECT_EQ(wrong, size_t(0)) << name << ": of " << x.size() << " elements; the worst, " << worst << ", is " << x[worst]
                              << ", should be " << y[worst] << ": " << worst_ratio << " times the limit";
}

inline void expect_same_bytes(const char* name, const TestTensor& a, const TestTensor& b) {
  EXPECT_TRUE(a.bytes() == b.bytes()) << name << " depends on the number of threads";
}

// The result tensors of a Built, with their names.
template <class Body>
void for_each_result(Built& b, bool backward, const Body& body) {
  if (!backward) {
    body("output", b.output), body("lse", b.lse), body("weights", b.weights);
    return;
  }
  body("grad_query", b.grad_query), body("grad_key", b.grad_key);
  body("grad_value", b.grad_value), body("grad_mask", b.grad_mask);
}

inline void expect_thread_invariant(const Kernel& kernel, const Built& done, Pass pass) {
  for (int workers : {2, 5}) {
    SCOPED_TRACE(std::to_string(workers) + " workers");
    Built again = done, before = done;
    for_each_result(again, pass == Pass::backward, [](const char*, TestTensor& t) { t.fill_with_poison(); });
    run(kernel, again.problem(), pass, workers);
    std::vector<TestTensor*> expected;
    for_each_result(before, pass == Pass::backward, [&](const char*, TestTensor& t) { expected.push_back(&t); });
    size_t k = 0;
    for_each_result(again, pass == Pass::backward,
                    [&](const char* name, TestTensor& t) { expect_same_bytes(name, t, *expected[k++]); });
  }
}

// False if the kernel takes neither pass of this case.
inline bool check_kernel(const Kernel& kernel, const Case& c) {
  const Kernel& reference = kernel_by_name("reference");
  Built b = build(c), wide = widened(b);
  bool ran = false;
  run(reference, wide.problem(), Pass::forward);
  if (!kernel.why_not(b.problem(), Pass::forward)) {
    ran = true;
    const Limits l = limits(b, wide, false);
    run(kernel, b.problem(), Pass::forward);
    expect_close("output", b.output, wide.output, l.output);
    expect_close("lse", b.lse, wide.lse, l.lse);
    expect_close("weights", b.weights, wide.weights, l.weights);
    expect_thread_invariant(kernel, b, Pass::forward);
  }
  if (!kernel.why_not(b.problem(), Pass::backward)) {
    ran = true;
    add_gradients(b);
    Built oracle = widened(b);
    run(reference, oracle.problem(), Pass::forward);
    const Limits l = limits(b, oracle, true);
    run(reference, oracle.problem(), Pass::backward);
    run(reference, b.problem(), Pass::forward);  // output, lse and weights as any forward hands them over
    run(kernel, b.problem(), Pass::backward);
    expect_close("grad_query", b.grad_query, oracle.grad_query, l.grad_query);
    expect_close("grad_key", b.grad_key, oracle.grad_key, l.grad_key);
    expect_close("grad_value", b.grad_value, oracle.grad_value, l.grad_value);
    expect_close("grad_mask", b.grad_mask, oracle.grad_mask, l.grad_mask);
    expect_thread_invariant(kernel, b, Pass::backward);
  }
  return ran;
}

}  // namespace scaledot::testing
