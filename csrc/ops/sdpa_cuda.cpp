// The ops on CUDA. Nothing here includes a header of torch's CUDA side, so the library loads under CPU and CUDA torch alike.
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include "cuda/masks.h"
#include "ops/explain.h"
#include "ops/make_problem.h"
#include "ops/run_cuda.h"
#include "ops/sdpa_dense.h"

namespace scaledot {
namespace {

Tensor empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, c10::Device device) {
  return at::empty_strided(sizes, strides, at::TensorOptions(type).device(device));
}

// Kernels read the seed on the device. One on the CPU is copied there, without waiting for the device.
OptionalTensor seed(const OptionalTensor& seed, c10::Device device) {
  const Tensor* given = present(seed);
  return given ? OptionalTensor(given->to(device, at::kLong, /*non_blocking=*/true).contiguous()) : std::nullopt;
}

void write_attends_cuda(const Problem& p, bool* attends, c10::Device device) {
  check_launch(write_attends(p, attends, CurrentDevice(device).stream()));
}
void write_bias_cuda(const Problem& p, void* bias, DType dtype, c10::Device device) {
  check_launch(write_bias(p, bias, dtype, CurrentDevice(device).stream()));
}
void write_dropout_mask_cuda(const Problem& p, bool* kept, c10::Device device) {
  check_launch(write_dropout_mask(p, kept, CurrentDevice(device).stream()));
}

}  // namespace

extern const Backend kCudaBackend = {empty,           /*averages=*/false,     seed, run_cuda, write_attends_cuda,
                                     write_bias_cuda, write_dropout_mask_cuda};

namespace {

Tensor3 sdpa_cuda(const SdpaArgs& args) { return sdpa_dense(kCudaBackend, args); }
Tensor4 sdpa_backward_cuda(const BackwardArgs& args) { return sdpa_backward_dense(kCudaBackend, args); }
Tensor2 sdpa_mask_cuda(const MaskArgs& args) { return sdpa_mask_dense(kCudaBackend, args); }
Tensor dropout_mask_cuda(const DropoutMaskArgs& args) { return dropout_mask_dense(kCudaBackend, args); }

void explain_pass_cuda(std::ostringstream& json, const Problem& problem, Pass pass) {
  const DeviceKernel& chosen = choose_cuda(problem, pass);
  explain_pass(json, cuda_kernels(), chosen, chosen.workspace(problem, pass), problem, pass);
}

std::string explain_cuda(const SdpaArgs& args) {
  const PretendedProblems problems = pretend(args);
  const CurrentDevice current(args.inputs.query.device());
  std::ostringstream json;
  json << "{";
  explain_pass_cuda(json, problems.forward, Pass::forward);
  json << ", ";
  explain_pass_cuda(json, problems.backward, Pass::backward);
  json << ", \"device\": \"cuda\", \"capability\": \"" << kCudaStatus << "\"}";
  return json.str();
}

}  // namespace

TORCH_LIBRARY_IMPL(scaledot, CUDA, m) {
  m.impl("sdpa", sdpa_kernel<&sdpa_cuda>);
  m.impl("sdpa_backward", backward_kernel<&sdpa_backward_cuda>);
  m.impl("sdpa_mask", mask_kernel<&sdpa_mask_cuda>);
  m.impl("dropout_mask", dropout_mask_kernel<&dropout_mask_cuda>);
  m.impl("explain", explain_kernel<&explain_cuda>);
}

}  // namespace scaledot
