// Runs a GPU kernel on a case in the simulation (device_sim/device_sim.h) and compares every result with the reference
// kernel's in float64.
#pragma once

#include "cuda/kernel.h"
#include "device_sim/device_sim.h"
#include "kernel_check.h"

namespace scaledot::testing {

inline void register_tensor(const TestTensor& t, bool writable) {
  if (!t.present() || t.count() == 0) return;
  int64_t extent = 0;
  t.for_each([&](int64_t, int64_t index) { extent = max(extent, index + 1); });
  sim::register_buffer(t.view().data, size_t(extent * element_size(t.dtype())), writable);
}

// Throws sim::Failure if the simulation finds an error, or if the kernel reports one. `register_tensors` registers the
// problem's tensors with the simulation.
template <class Register>
void run_device(const DeviceKernel& kernel, const Problem& problem, Pass pass, const Register& register_tensors) {
  constexpr uint8_t kPoison = 0xff;  // NaN
  const int64_t bytes = kernel.workspace(problem, pass);
  const std::unique_ptr<uint8_t, decltype(&std::free)> workspace(
      static_cast<uint8_t*>(std::aligned_alloc(size_t(kAlignment), size_t(round_up(bytes + 1, kAlignment)))),
      &std::free);
  std::memset(workspace.get(), kPoison, size_t(bytes));
  sim::clear_buffers();
  sim::register_buffer(workspace.get(), size_t(bytes), true);
  register_tensors();
  const DeviceExecutor executor = {nullptr, workspace.get()};
  const char* error = (pass == Pass::forward ? kernel.forward : kernel.backward)(problem, executor);
  sim::clear_buffers();
  if (error) throw sim::Failure(error);
}

inline void run_device(const DeviceKernel& kernel, const Built& b, Pass pass) {
  RedZones zones;
  add_tensors(zones, b);
  run_device(kernel, b.problem(), pass, [&] { for_each_tensor(b, pass == Pass::backward, register_tensor); });
}

inline double largest(const std::vector<double>& values) {
  double result = 0;
  for (double x : values)
    if (std::isfinite(x)) result = max(result, std::abs(x));
  return result;
}

// Allows for underflow: RoundingAnalysis has only relative errors. A sum has `terms` of numbers that lost up to `lost`,
// each times up to `factor`.
inline void allow_underflow(std::vector<double>& limits, double lost, double terms, double factor) {
  for (double& x : limits) x += kDeviations * std::sqrt(terms) * lost * factor;
}

// In float16 a weight or score gradient below the smallest normal number loses up to half of the smallest number. In
// float32 a weight below 2^-126 counts as 0, and the gradient of its score with it (fast_exp2).
inline Oracle solve_for_device(const Case& c) {
  Oracle oracle = solve(c, /*tensor_cores=*/true);
  if (c.dtype == DType::float64) return oracle;
  const Built& wide = oracle.backward;
  const Problem p = wide.problem();
  const double kept = dropout_scale(p), scale = std::abs(p.scale), keys = double(p.key_length);
  const double rows = double(p.query_length * (p.heads / p.kv_heads));
  const double value = largest(wide.value.values()), grad_output = largest(wide.grad_output.values());
  const double grad_weight = double(p.value_dim) * grad_output * value + largest(wide.grad_weights.values());
  const bool is_half = c.dtype == DType::float16;
  const double of_weight = is_half ? smallest(DType::float16) / 2 : 0x1p-126;
  const double of_score = is_half ? of_weight : of_weight * kept * grad_weight;
  allow_underflow(oracle.limits.output, of_weight, keys, kept * value);
  allow_underflow(oracle.limits.grad_query, of_score, keys, scale * largest(wide.key.values()));
  allow_underflow(oracle.limits.grad_key, of_score, rows, scale * largest(wide.query.values()));
  allow_underflow(oracle.limits.grad_value, of_weight, rows, grad_output);
  if (!is_half) allow_underflow(oracle.limits.grad_mask, of_score, rows, 1);
  return oracle;
}

// Returns false if the kernel supports neither pass of this case.
inline bool check_device_kernel(const DeviceKernel& kernel, const Case& c) {
  Built b = build(c);
  const bool forward = !kernel.why_not(b.problem(), Pass::forward);
  const bool backward = !kernel.why_not(b.problem(), Pass::backward);
  if (!forward && !backward) return false;
  const Oracle oracle = solve_for_device(c);
  if (forward) {
    run_device(kernel, b, Pass::forward);
    expect_forward(b, oracle);
  }
  if (backward) {
    add_gradients(b);
    run(kernel_by_name("reference"), b, Pass::forward);  // for output, lse and weights
    run_device(kernel, b, Pass::backward);
    expect_backward(b, oracle);
  }
  return true;
}

}  // namespace scaledot::testing
