// A backend has what differs between the devices that have kernels.
#pragma once

#include <sstream>

#include "core/kernel.h"
#include "ops/common/op.h"

namespace scaledot {

struct Backend {
  const char* device;           // "cpu" | "cuda"
  const char* (*capability)();  // what explain() says of the device
  // Throws if the kernels are not there; nullptr for a device that always has them. `name`: of the argument.
  void (*require_kernels)(const Tensor& tensor, const char* name) = nullptr;
  Tensor (*empty)(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, c10::Device device);
  // Whether kernels can save the softmax for the backward (core/saved.h).
  bool saves_softmax = false;
  // Whether kernels for packed sequences sum the gradient of an attn_mask over its heads. Otherwise they write that of
  // each head.
  bool sums_packed_mask = false;
  // With more keys than these, a call of 16 bits saves the low part of its output (core/saved.h).
  int64_t keys_without_output_low = 0;
  // dropout_seed as kernels read it: contiguous, in memory of the device.
  OptionalTensor (*seed)(const OptionalTensor& seed, c10::Device device);
  // Selects a kernel and runs it, for packed sequences too. Not for a problem without rows or keys.
  void (*run)(const Problem& problem, Pass pass, c10::Device device);
  // Writes the JSON of one pass: the kernel, why each faster one was refused, the workspace.
  void (*explain)(std::ostringstream& json, const Problem& problem, Pass pass, c10::Device device);
  void (*explain_packed)(std::ostringstream& json, const Problem& packed, Pass pass, c10::Device device);
  // The masks written out: whether row i may attend to key j; -slope * |distance| in float32 or float64; whether
  // dropout keeps a weight.
  void (*write_attends)(const Problem& problem, bool* attends, c10::Device device);
  void (*write_bias)(const Problem& problem, void* bias, DType dtype, c10::Device device);
  void (*write_dropout_mask)(const Problem& problem, bool* keep, c10::Device device);
};

extern const Backend kCpuBackend;   // ops/cpu/backend.cpp
extern const Backend kCudaBackend;  // ops/cuda/backend.cpp

inline const Backend* backend_of(c10::Device device) {
  return device.is_cpu() ? &kCpuBackend : device.is_cuda() ? &kCudaBackend : nullptr;
}

}  // namespace scaledot
