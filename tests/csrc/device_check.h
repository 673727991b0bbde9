// Runs one GPU kernel on one case in the simulation (device_sim/device_sim.h) and compares every result with the reference kernel's
// in float64.
#pragma once

#include "cuda/kernel.h"
#include "device_sim/device_sim.h"
#include "kernel_check.h"

namespace scaledot::testing {

// All of a case's tensors; writable are those that the pass makes.
template <class Body>
void for_each_tensor(const Built& b, bool backward, const Body& body) {
  for (const TestTensor* t : {&b.query, &b.key, &b.value, &b.attn_mask, &b.alibi_slopes}) body(*t, false);
  for (const TestTensor* t : {&b.output, &b.lse, &b.weights}) body(*t, !backward);
  for (const TestTensor* t : {&b.grad_output, &b.grad_lse, &b.grad_weights}) body(*t, false);
  for (const TestTensor* t : {&b.grad_query, &b.grad_key, &b.grad_value, &b.grad_mask}) body(*t, backward);
}

// Throws sim::Failure for what the simulation finds, and if the kernel reports an error.
inline void run_device(const DeviceKernel& kernel, const Built& b, Pass pass) {
  constexpr uint8_t kPoison = 0xff;  // NaN
  const Problem problem = b.problem();
  const int64_t bytes = kernel.workspace(problem, pass);
  const std::unique_ptr<uint8_t, decltype(&std::free)> workspace(
      static_cast<uint8_t*>(std::aligned_alloc(size_t(kAlignment), size_t(round_up(bytes + 1, kAlignment)))),
      &std::free);
  std::memset(workspace.get(), kPoison, size_t(bytes));
  sim::clear_buffers();
  sim::register_buffer(workspace.get(), size_t(bytes), true);
  for_each_tensor(b, pass == Pass::backward, [](const TestTensor& t, bool writable) {
    if (!t.present() || t.count() == 0) return;
    int64_t extent = 0;
    t.for_each([&](int64_t, int64_t index) { extent = larger(extent, index + 1); });
    sim::register_buffer(t.view().data, size_t(extent * element_size(t.dtype())), writable);
  });
  const DeviceExecutor executor = {nullptr, workspace.get()};
  const char* error = (pass == Pass::forward ? kernel.forward : kernel.backward)(problem, executor);
  sim::clear_buffers();
  if (error) throw sim::Failure(error);
}

// On tensor cores weights and score gradients are rounded to the 16-bit type before they are multiplied: each is off by half a
// unit, and what underflows by half the smallest number. Weights add up to 1 in a row, and to at most l.column in what a row of grad_key or grad_value is a sum over.
inline void add_operand_rounding(Limits& l, const Built& b, const Built& wide) {
  if (b.c.dtype != DType::bfloat16 && b.c.dtype != DType::float16) return;
  const Problem p = wide.problem();
  const double half = unit(b.c.dtype) / 2, tiny = smallest(b.c.dtype) / 2, kept = 1 / (1 - p.dropout_p);
  const double keys = double(p.key_length), rows = double(p.query_length * (p.heads / p.kv_heads));
  const double value = largest_norm(wide.value.values(), p.value_dim), scale = std::abs(p.scale);
  const double grad_output = largest_norm(wide.grad_output.values(), p.value_dim);
  const double grad_score =
      2 * kept * (grad_output * value + largest(wide.grad_weights.values())) + largest(wide.grad_lse.values());
  l.output += kept * largest(wide.value.values()) * (half + tiny * keys);
  l.grad_query += scale * largest(wide.key.values()) * (half * grad_score + tiny * keys);
  l.grad_key += scale * largest(wide.query.values()) * (half * grad_score * l.column + tiny * rows);
  l.grad_value += kept * largest(wide.grad_output.values()) * (half * l.column + tiny * rows);
}

// False if the kernel takes neither pass of this case.
inline bool check_device_kernel(const DeviceKernel& kernel, const Case& c) {
  const Kernel& reference = kernel_by_name("reference");
  Built b = build(c), wide = widened(b);
  bool ran = false;
  run(reference, wide.problem(), Pass::forward);
  if (!kernel.why_not(b.problem(), Pass::forward)) {
    ran = true;
    Limits l = limits(b, wide, false);
    add_operand_rounding(l, b, wide);
    run_device(kernel, b, Pass::forward);
    expect_close("output", b.output, wide.output, l.output);
    expect_close("lse", b.lse, wide.lse, l.lse);
    expect_close("weights", b.weights, wide.weights, l.weights);
  }
  if (!kernel.why_not(b.problem(), Pass::backward)) {
    ran = true;
    add_gradients(b);
    Built oracle = widened(b);
    run(reference, oracle.problem(), Pass::forward);
    Limits l = limits(b, oracle, true);
    add_operand_rounding(l, b, oracle);
    run(reference, oracle.problem(), Pass::backward);
    run(reference, b.problem(), Pass::forward);  // output, lse and weights as any forward hands them over
    run_device(kernel, b, Pass::backward);
    expect_close("grad_query", b.grad_query, oracle.grad_query, l.grad_query);
    expect_close("grad_key", b.grad_key, oracle.grad_key, l.grad_key);
    expect_close("grad_value", b.grad_value, oracle.grad_value, l.grad_value);
    expect_close("grad_mask", b.grad_mask, oracle.grad_mask, l.grad_mask);
  }
  return ran;
}

}  // namespace scaledot::testing
