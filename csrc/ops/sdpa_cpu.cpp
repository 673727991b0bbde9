// The ops on the CPU.
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include "ops/large_pages.h"
#include "ops/make_problem.h"
#include "ops/masks_cpu.h"
#include "ops/run_cpu.h"
#include "ops/sdpa_dense.h"

namespace scaledot {
namespace {

Tensor empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, c10::Device) {
  Tensor result(at::detail::empty_strided_cpu(sizes, strides, type));
  prefer_large_pages(result.mutable_data_ptr(), int64_t(result.nbytes()));
  return result;
}

// A strided seed is copied once so that kernels can read neighbouring numbers.
OptionalTensor seed(const OptionalTensor& seed, c10::Device) {
  const Tensor* given = present(seed);
  return given ? OptionalTensor(given->contiguous()) : std::nullopt;
}

void run(const Problem& problem, Pass pass, c10::Device) { run_cpu(problem, pass); }

void write_attends(const Problem& p, bool* attends, c10::Device) { write_attends_cpu(p, attends); }
void write_bias(const Problem& p, void* bias, DType dtype, c10::Device) { write_bias_cpu(p, bias, dtype); }
void write_dropout_mask(const Problem& p, bool* kept, c10::Device) { write_dropout_mask_cpu(p, kept); }

}  // namespace

extern const Backend kCpuBackend = {empty, /*averages=*/true, seed, run, write_attends, write_bias, write_dropout_mask};

namespace {

Tensor3 sdpa_cpu(const SdpaArgs& args) { return sdpa_dense(kCpuBackend, args); }
Tensor4 sdpa_backward_cpu(const BackwardArgs& args) { return sdpa_backward_dense(kCpuBackend, args); }
Tensor2 sdpa_mask_cpu(const MaskArgs& args) { return sdpa_mask_dense(kCpuBackend, args); }
Tensor dropout_mask_cpu(const DropoutMaskArgs& args) { return dropout_mask_dense(kCpuBackend, args); }

}  // namespace

TORCH_LIBRARY_IMPL(scaledot, CPU, m) {
  m.impl("sdpa", sdpa_kernel<&sdpa_cpu>);
  m.impl("sdpa_backward", backward_kernel<&sdpa_backward_cpu>);
  m.impl("sdpa_mask", mask_kernel<&sdpa_mask_cpu>);
  m.impl("dropout_mask", dropout_mask_kernel<&dropout_mask_cpu>);
}

}  // namespace scaledot
