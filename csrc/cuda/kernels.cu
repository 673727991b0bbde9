// The table of GPU kernels, fastest first, and the only place where a kernel is chosen.
#include "core/mask.h"
#include "cuda/generic/generic.h"
#include "cuda/ptx/launch.h"
#include "cuda/sm90/sm90.h"

namespace scaledot {
namespace {

QuantisedForward quantised(DType dtype) {
  switch (dtype) {
    case DType::bfloat16: return kQuantisedBFloat16;
    case DType::float16: return kQuantisedFloat16;
    default: return kQuantisedFloat32;
  }
}

constexpr int kSm90Capability = 90;
constexpr int kMinCapability = 80;  // for mma.m16n8k16 with bfloat16, and cp.async

// Never launched: only to ask CUDA whether the library has code for the device.
SCALEDOT_KERNEL(kWarpSize) probe_kernel() {}

constexpr int64_t kMaxColumns = int64_t(1) << 24;  // column indices are 32-bit

// Requirements of all generic kernels.
const char* any_generic_why_not(const Problem& p, Pass pass) {
  if (device_traits().capability < kMinCapability) return "it needs a GPU of compute capability 8.0 or higher";
  if (!has_code<probe_kernel>())
    return "it was not compiled for this GPU, whose architecture TORCH_CUDA_ARCH_LIST lacks";
  if (max(p.head_dim, p.value_dim) > kMaxColumns) return "head_dim or value_dim is above 2^24";
  if (is_packed(p) && p.grad_mask.data && grad_mask_is_broadcast(p))
    return "the sequences are packed, and the gradient of attn_mask is a sum over heads";
  if (generic_kernels(p.dtype).blocks(p, pass) > kMaxBlocks) return "it would take more than 2^31 - 1 blocks";
  return nullptr;
}
const char* generic_why_not(const Problem& p, Pass pass) {
  return is_quantised(p) ? "keys and values are quantised" : any_generic_why_not(p, pass);
}
const char* quantised_why_not(const Problem& p, Pass pass) {
  if (!is_quantised(p)) return "keys and values are not quantised";
  if (pass == Pass::backward) return "quantised keys and values have no backward";
  if (!is_packed(p)) return "the sequences are not packed";
  return any_generic_why_not(p, pass);
}
int64_t generic_workspace(const Problem& p, Pass pass) { return generic_kernels(p.dtype).workspace(p, pass); }
const char* generic_forward(const Problem& p, const DeviceExecutor& executor) {
  return generic_kernels(p.dtype).forward(p, executor);
}
const char* generic_backward(const Problem& p, const DeviceExecutor& executor) {
  return generic_kernels(p.dtype).backward(p, executor);
}
const char* quantised_forward(const Problem& p, const DeviceExecutor& executor) {
  return quantised(p.dtype)(p, executor);
}

const Sm90Kernels& sm90(const Problem& p, Pass pass) {
  const bool bfloat16 = p.dtype == DType::bfloat16;
  if (pass == Pass::forward) return bfloat16 ? kSm90ForwardBFloat16 : kSm90ForwardFloat16;
  return bfloat16 ? kSm90BackwardBFloat16 : kSm90BackwardFloat16;
}
const char* sm90_kernel_why_not(const Problem& p, Pass pass) {
  if (!kHasSm90) return "it was not compiled: TORCH_CUDA_ARCH_LIST lacks 9.0a";
  if (p.dtype != DType::bfloat16 && p.dtype != DType::float16) return "it takes bfloat16 and float16 only";
  if (device_traits().capability != kSm90Capability) return "the GPU's compute capability is not 9.0";
  if (p.part.given) return "the call is a part of a larger attention";
  if (p.relative_bias.data) return "relative_bias is given";
  if (const char* reason = sm90_why_not(p, pass)) return reason;
  // The generic kernels compute the weights, and a part of the backward.
  return p.weights.data || pass == Pass::backward ? generic_why_not(p, pass) : nullptr;
}
int64_t sm90_workspace(const Problem& p, Pass pass) { return sm90(p, pass).workspace(p); }
const char* sm90_forward(const Problem& p, const DeviceExecutor& executor) {
  return sm90(p, Pass::forward).run(p, executor);
}
const char* sm90_backward(const Problem& p, const DeviceExecutor& executor) {
  return sm90(p, Pass::backward).run(p, executor);
}

const DeviceKernel kKernels[] = {
    {"sm90", sm90_kernel_why_not, sm90_workspace, sm90_forward, sm90_backward},
    {"generic", generic_why_not, generic_workspace, generic_forward, generic_backward},
    {"generic_quantised", quantised_why_not, generic_workspace, quantised_forward, nullptr},
};
constexpr int kCount = sizeof(kKernels) / sizeof(kKernels[0]);

}  // namespace

DeviceKernelTable cuda_kernels() { return {kKernels, kCount}; }

int device_capability() { return device_traits().capability; }

const DeviceKernel* select_cuda(const Problem& problem, Pass pass) {
  for (const DeviceKernel& kernel : kKernels)
    if (!kernel.why_not(problem, pass)) return &kernel;
  return nullptr;
}

}  // namespace scaledot
