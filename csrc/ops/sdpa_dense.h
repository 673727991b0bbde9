// The ops for dense tensors, once for all devices: check, allocate, make the Problem, run a kernel.
#pragma once

#include "core/kernel.h"
#include "ops/schema.h"

namespace scaledot {

// What differs between devices.
struct Backend {
  Tensor (*empty)(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, c10::Device device);
  // Whether kernels take a place for the mean of the weights over the heads: TensorView weights without a head stride.
  bool averages;
  // dropout_seed as kernels read it: two neighbouring numbers, in memory of the device.
  OptionalTensor (*seed)(const OptionalTensor& seed, c10::Device device);
  // Selects a kernel and runs it, for packed sequences too. Not for a problem without rows or keys.
  void (*run)(const Problem& problem, Pass pass, c10::Device device);
  // Whether row i attends to key j, for all of them; -slope * |distance| in float32 or float64; whether dropout keeps a weight.
  void (*write_attends)(const Problem& problem, bool* attends, c10::Device device);
  void (*write_bias)(const Problem& problem, void* bias, DType dtype, c10::Device device);
  void (*write_dropout_mask)(const Problem& problem, bool* kept, c10::Device device);
};

extern const Backend kCpuBackend;   // ops/sdpa_cpu.cpp
extern const Backend kCudaBackend;  // ops/sdpa_cuda.cpp, where CUDA kernels are built

Tensor3 sdpa_dense(const Backend& backend, const SdpaArgs& args);
Tensor4 sdpa_backward_dense(const Backend& backend, const BackwardArgs& args);
// What core/mask.h and core/philox.h decide, written out: for the formula of the double backward (ops/formula.h) and the tests.
Tensor2 sdpa_mask_dense(const Backend& backend, const MaskArgs& args);
Tensor dropout_mask_dense(const Backend& backend, const DropoutMaskArgs& args);

// The problems of a call's forward and backward, of tensors without data.
struct PretendedProblems {
  Problem forward, backward;
};
PretendedProblems pretend(const SdpaArgs& args);

}  // namespace scaledot
