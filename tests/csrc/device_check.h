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

// Allows for float16 underflow: a weight or score gradient below the smallest normal number loses up to half of the
// smallest number. RoundingAnalysis has only relative errors. A sum has `terms` of them, each times up to `factor`.
inline void allow_underflow(std::vector<double>& limits, double terms, double factor) {
  for (double& x : limits) x += kDeviations * std::sqrt(terms) * smallest(DType::float16) / 2 * factor;
}

inline Oracle solve_for_device(const Case& c) {
  Oracle oracle = solve(c, /*tensor_cores=*/true);
  if (c.dtype != DType::float16) return oracle;
  const Built& wide = oracle.backward;
  const Problem p = wide.problem();
  const double kept = dropout_scale(p), scale = std::abs(p.scale), keys = double(p.key_length);
  const double rows = double(p.query_length * (p.heads / p.kv_heads));
  allow_underflow(oracle.limits.output, keys, kept * largest(wide.value.values()));
  allow_underflow(oracle.limits.grad_query, keys, scale * largest(wide.key.values()));
  allow_underflow(oracle.limits.grad_key, rows, scale * largest(wide.query.values()));
  allow_underflow(oracle.limits.grad_value, rows, largest(wide.grad_output.values()));
  return oracle;
}

// A forward that keeps what rounding took off its output, and a backward that takes it.
inline void check_device_output_low(const DeviceKernel& kernel, const Case& c, const Oracle& oracle) {
  SCOPED_TRACE("the low part of the output is saved");
  Built b = build(c);
  add_output_low(b);
  run_device(kernel, b, Pass::forward);
  expect_forward(b, oracle);
  expect_output_low(b, oracle);
  add_gradients(b);
  run_device(kernel, b, Pass::backward);
  expect_backward(b, oracle);
}

// Returns false if the kernel supports neither pass of this case.
inline bool check_device_kernel(const DeviceKernel& kernel, const Case& c) {
  Built b = build(c);
  const bool forward = !kernel.why_not(b.problem(), Pass::forward);
  const bool backward = !c.average_weights && !kernel.why_not(b.problem(), Pass::backward);
  if (!forward && !backward) return false;
  const Oracle oracle = solve_for_device(c);
  if (forward) {
    run_device(kernel, b, Pass::forward);
    expect_forward(b, oracle);
  }
  if (forward && backward && has_output_low(c.dtype) && c.value_dim % 2 == 0)
    check_device_output_low(kernel, c, oracle);
  if (backward) {
    add_gradients(b);
    set_results(b, oracle.forward);
    run_device(kernel, b, Pass::backward);
    expect_backward(b, oracle);
  }
  return true;
}

}  // namespace scaledot::testing
