// Runs one kernel on one case, and compares every element of every result with the float64 reference kernel, within the
// limits of rounding_limits.h.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <string>
#include <utility>

#include "executors.h"
#include "problem_builder.h"
#include "reference.h"
#include "rounding_limits.h"
#include "unchecked.h"

namespace scaledot::testing {

// Below the smallest normal number there is no relative precision.
inline double smallest(DType dtype) { return dtype == DType::float16 ? 0x1p-24 : 1e-37; }

// The largest error of an element, relative to what is allowed: its limit and the rounding to the result's dtype.
// Infinite if only one of the two values is finite.
struct Worst {
  double ratio = 0;
  size_t element = 0, wrong = 0;
};

inline Worst worst_of(const std::vector<double>& found, const std::vector<double>& oracle, DType dtype,
                      const std::vector<double>& limit) {
  const double roundings = dtype == DType::float64 ? 2 : 1;  // the oracle is float64, and rounds its results too
  Worst worst;
  for (size_t k = 0; k < found.size(); ++k) {
    const double x = found[k], y = oracle[k];
    const double allowed = limit[k] + roundings * 1.0001 * unit_roundoff(dtype) * std::abs(y) + smallest(dtype);
    const bool same_kind = std::isfinite(x) == std::isfinite(y) && std::isnan(x) == std::isnan(y);
    double ratio = std::isfinite(x) && std::isfinite(y) ? std::abs(x - y) / allowed : same_kind ? 0.0 : kInfinity;
    if (std::isnan(ratio)) ratio = kInfinity;  // a limit that is NaN allows nothing
    worst.wrong += ratio > 1;
    if (ratio > worst.ratio) worst.ratio = ratio, worst.element = k;
  }
  return worst;
}

inline void expect_close(const char* name, const TestTensor& found, const TestTensor& oracle,
                         const std::vector<double>& limit) {
  if (!found.present()) return;
  EXPECT_TRUE(found.intact()) << name << ": something around the tensor was written to";
  const std::vector<double> x = found.values(), y = oracle.values();
  ASSERT_EQ(x.size(), y.size()) << name;
  ASSERT_EQ(x.size(), limit.size()) << name;
  const Worst worst = worst_of(x, y, found.dtype(), limit);
  EXPECT_EQ(worst.wrong, size_t(0)) << name << ": of " << x.size() << " elements; the worst, " << worst.element
                                    << ", is " << x[worst.element] << ", should be " << y[worst.element] << ": "
                                    << worst.ratio << " times the limit";
}

// Runs one pass on threads, or without them if `shuffle` is given, with red zones around all tensors.
inline void run(const Kernel& kernel, const Built& b, Pass pass, int workers = 1, const uint64_t* shuffle = nullptr) {
  RedZones zones;
  add_tensors(zones, b);
  shuffle ? run_shuffled(kernel, b.problem(), pass, workers, *shuffle) : run(kernel, b.problem(), pass, workers);
}

// The saved softmax, which may be anything where positions exclude a key (core/saved.h): these elements become 0.
inline std::vector<double> defined_weights(const Built& b) {
  const Problem p = b.problem();
  std::vector<double> result = b.saved_softmax.values();
  const int64_t columns = b.saved_softmax.cols();
  for (size_t k = 0; k < result.size(); ++k) {
    const int64_t key = int64_t(k) % columns;
    const Range keys = row_keys(p, int64_t(k) / columns % p.query_length);
    if (key < keys.begin || key >= min(keys.end, b.saved_keys)) result[k] = 0;
    if (std::isnan(result[k])) result[k] = kNaN;
  }
  return result;
}

inline void expect_same_bytes(const char* name, const TestTensor& a, const TestTensor& b) {
  EXPECT_TRUE(a.bytes() == b.bytes()) << name << " depends on the number of threads";
}

// The result tensors of a Built, with their names.
template <class AnyBuilt, class Body>
void for_each_result(AnyBuilt& b, bool backward, const Body& body) {
  if (!backward) {
    body("output", b.output), body("lse", b.lse), body("weights", b.weights);
    return;
  }
  body("grad_query", b.grad_query), body("grad_key", b.grad_key);
  body("grad_value", b.grad_value), body("grad_mask", b.grad_mask);
  body("grad_relative_bias", b.grad_relative_bias);
}

inline void expect_same_results(const Kernel& kernel, const Built& done, Pass pass, int workers,
                                const uint64_t* shuffle = nullptr) {
  SCOPED_TRACE(std::to_string(workers) + " workers");
  Built again = done;
  for_each_result(again, pass == Pass::backward, [](const char*, TestTensor& t) { t.fill_with_finite(); });
  if (pass == Pass::forward) again.saved_softmax.fill_with_poison(), again.output_low.fill_with_poison();
  run(kernel, again, pass, workers, shuffle);
  expect_same_bytes("output_low", again.output_low, done.output_low);
  if (done.saved_softmax.present()) {
    const std::vector<double> saved = defined_weights(again), before = defined_weights(done);
    EXPECT_EQ(std::memcmp(saved.data(), before.data(), saved.size() * sizeof(double)), 0)
        << "the saved softmax depends on the number of threads";
  }
  std::vector<const TestTensor*> expected;
  for_each_result(done, pass == Pass::backward, [&](const char*, const TestTensor& t) { expected.push_back(&t); });
  size_t k = 0;
  for_each_result(again, pass == Pass::backward,
                  [&](const char* name, const TestTensor& t) { expect_same_bytes(name, t, *expected[k++]); });
}

inline void expect_thread_invariant(const Kernel& kernel, const Built& done, Pass pass) {
  for (int workers : {2, 5}) expect_same_results(kernel, done, pass, workers);
}

// The results of a case in float64, and the limits of rounding errors.
struct Oracle {
  Built forward, backward;  // in float64, with results
  Limits limits;
};

// The mean over the heads of (batch, heads, row, col) numbers.
inline std::vector<double> mean_over_heads(const std::vector<double>& of_heads, const Case& c) {
  const size_t heads = size_t(c.heads), scores = size_t(c.query_length * c.key_length);
  std::vector<double> result(of_heads.size() / heads, 0.0);
  for (size_t k = 0; k < of_heads.size(); ++k)
    result[k / (heads * scores) * scores + k % scores] += of_heads[k] / double(heads);
  return result;
}

// The oracle has the weights of each head, and the limits of their errors. Those of the mean follow: at most, the
// errors of the heads add up, and each addition rounds.
inline void take_mean_of_weights(Oracle& oracle, const Case& c) {
  TestTensor mean(DType::float64, c.batch, c.heads, c.query_length, c.key_length, MemoryOrder::contiguous,
                  {false, true, false, false});
  mean.set(mean_over_heads(oracle.forward.weights.values(), c));
  oracle.limits.weights = mean_over_heads(oracle.limits.weights, c);
  const std::vector<double> values = mean.values();
  for (size_t k = 0; k < values.size(); ++k)
    oracle.limits.weights[k] += double(c.heads) * unit_roundoff(lse_dtype(c.dtype)) * std::abs(values[k]);
  oracle.forward.weights = mean;
}

// Output, lse and weights as the reference forward of b would store them.
inline void set_results(Built& b, const Built& oracle) {
  for (TestTensor Built::*t : {&Built::output, &Built::lse, &Built::weights})
    if ((b.*t).present()) (b.*t).set((oracle.*t).values());
}

// `b` has its gradients, or `backward` is false. All on this thread.
inline Oracle solve(const Built& b, bool tensor_cores = false, bool backward = true) {
  const Unchecked unchecked;
  Oracle oracle = {widened(b), {}, {}};
  run(kReferenceKernel, oracle.forward.problem(), Pass::forward);
  if (backward) {
    oracle.backward = oracle.forward;
    run(kReferenceKernel, oracle.backward.problem(), Pass::backward);
  }
  oracle.limits = RoundingAnalysis(backward ? oracle.backward : oracle.forward, b.c.dtype, b.c.cache, b.v_scale.view(),
                                   tensor_cores)
                      .limits(backward);
  if (b.c.average_weights) take_mean_of_weights(oracle, b.c);
  return oracle;
}

inline Oracle solve(const Case& c, bool tensor_cores = false) {
  Built b = build(c);
  add_gradients(b);
  return solve(b, tensor_cores);
}

// A case with what all kernels share. The last kCachedCases are cached, since drawing normals takes longer than most
// kernels.
struct Prepared {
  Built inputs, with_gradients;
  Oracle oracle;
};
constexpr size_t kCachedCases = 4;
inline const Prepared& prepared(const Case& c) {
  static std::deque<std::pair<std::string, Prepared>> cached;
  for (const auto& [name, one] : cached)
    if (name == c.name) return one;
  if (cached.size() == kCachedCases) cached.pop_front();
  Prepared one = {build(c), {}, {}};
  one.with_gradients = one.inputs;
  add_gradients(one.with_gradients);
  one.oracle = solve(one.with_gradients);
  return cached.emplace_back(c.name, std::move(one)).second;
}
inline const Oracle& oracle_of(const Case& c) { return prepared(c).oracle; }

inline void expect_forward(const Built& b, const Oracle& oracle) {
  expect_close("output", b.output, oracle.forward.output, oracle.limits.output);
  expect_close("lse", b.lse, oracle.forward.lse, oracle.limits.lse);
  expect_close("weights", b.weights, oracle.forward.weights, oracle.limits.weights);
}

inline void expect_backward(const Built& b, const Oracle& oracle) {
  expect_close("grad_query", b.grad_query, oracle.backward.grad_query, oracle.limits.grad_query);
  expect_close("grad_key", b.grad_key, oracle.backward.grad_key, oracle.limits.grad_key);
  expect_close("grad_value", b.grad_value, oracle.backward.grad_value, oracle.limits.grad_value);
  expect_close("grad_mask", b.grad_mask, oracle.backward.grad_mask, oracle.limits.grad_mask);
  expect_close("grad_relative_bias", b.grad_relative_bias, oracle.backward.grad_relative_bias,
               oracle.limits.grad_relative_bias);
}

inline void check_forward(const Kernel& kernel, const Case& c) {
  Built b = prepared(c).inputs;
  run(kernel, b, Pass::forward);
  expect_forward(b, oracle_of(c));
  expect_thread_invariant(kernel, b, Pass::forward);
}

// A forward that saves the softmax of the first `keys` keys, and a backward that takes it. If recorded calls of this
// kind may save theirs, the forward's results have the bits of one that saves nothing.
inline void check_kept(const Kernel& kernel, const Case& c, int64_t keys, bool on_threads) {
  SCOPED_TRACE("weights of " + std::to_string(keys) + " keys are saved");
  Built b = prepared(c).inputs, plain = b;
  add_saved_softmax(b, keys);
  run(kernel, b, Pass::forward);
  run(kernel, plain, Pass::forward);
  EXPECT_TRUE(b.saved_softmax.intact());
  expect_forward(b, oracle_of(c));
  const bool equal = b.output.bytes() == plain.output.bytes() && b.lse.bytes() == plain.lse.bytes();
  EXPECT_TRUE(equal || !may_save_softmax(b.problem()));
  EXPECT_TRUE(!b.weights.present() || b.weights.bytes() == plain.weights.bytes());
  if (on_threads) expect_thread_invariant(kernel, b, Pass::forward);
  add_gradients(b);
  run(kernel, b, Pass::backward);
  expect_backward(b, oracle_of(c));
  if (on_threads) expect_thread_invariant(kernel, b, Pass::backward);
}

// Output and low part together have the precision of the sums.
inline void expect_output_low(const Built& b, const Oracle& oracle) {
  EXPECT_TRUE(b.output_low.intact());
  const std::vector<double> output = b.output.values(), output_low = b.output_low.values();
  const std::vector<double> exact = oracle.forward.output.values();
  const double roundoff = unit_roundoff(b.c.dtype), subnormal = smallest(b.c.dtype);
  size_t wrong = 0;
  for (size_t k = 0; k < exact.size(); ++k) {
    const double error = std::abs(output[k] + output_low[k] - exact[k]);
    const double allowed = oracle.limits.output[k] + 2 * roundoff * roundoff * std::abs(exact[k]) + subnormal;
    wrong += std::isfinite(output[k]) ? !(error <= allowed) : output_low[k] != 0;
  }
  EXPECT_EQ(wrong, size_t(0)) << "elements of output + output_low";
}

// A forward that keeps what rounding took off its output, and a backward that takes it.
inline void check_output_low(const Kernel& kernel, const Case& c) {
  SCOPED_TRACE("the low part of the output is saved");
  Built b = prepared(c).inputs, plain = b;
  add_output_low(b);
  run(kernel, b, Pass::forward);
  run(kernel, plain, Pass::forward);
  expect_output_low(b, oracle_of(c));
  EXPECT_TRUE(b.output.bytes() == plain.output.bytes() && b.lse.bytes() == plain.lse.bytes());
  expect_thread_invariant(kernel, b, Pass::forward);
  add_gradients(b);
  run(kernel, b, Pass::backward);
  expect_backward(b, oracle_of(c));
}

// Checks a backward that reads the weights that the forward returns.
inline void check_reuse_returned(const Kernel& kernel, const Case& c) {
  SCOPED_TRACE("the backward reads the returned weights");
  Built b = prepared(c).with_gradients;
  run(kernel, b, Pass::forward);
  b.reuse_returned = true;
  run(kernel, b, Pass::backward);
  expect_backward(b, oracle_of(c));
  expect_thread_invariant(kernel, b, Pass::backward);
}

inline void check_backward(const Kernel& kernel, const Case& c) {
  Built b = prepared(c).with_gradients;
  set_results(b, oracle_of(c).forward);
  run(kernel, b, Pass::backward);
  expect_backward(b, oracle_of(c));
  expect_thread_invariant(kernel, b, Pass::backward);
}

}  // namespace scaledot::testing
