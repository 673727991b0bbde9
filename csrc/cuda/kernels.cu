// The table of GPU kernels, fastest first, and the one place where a kernel is chosen.
#include "cuda/generic/generic.h"
#include "cuda/ptx/launch.h"

namespace scaledot {
namespace {

const GenericKernels& generic(DType dtype) {
  switch (dtype) {
    case DType::float64: return kGenericFloat64;
    case DType::bfloat16: return kGenericBFloat16;
    case DType::float16: return kGenericFloat16;
    default: return kGenericFloat32;
  }
}

constexpr int64_t kMaxColumns = int64_t(1) << 24;  // indices of columns are 32-bit

const char* generic_why_not(const Problem& p, Pass pass) {
  if (larger(p.head_dim, p.value_dim) > kMaxColumns) return "head_dim or value_dim is above 2^24";
  if (generic(p.dtype).blocks(p, pass) > kMaxBlocks) return "it would take more than 2^31 - 1 blocks";
  return nullptr;
}
int64_t generic_workspace(const Problem& p, Pass pass) { return generic(p.dtype).workspace(p, pass); }
const char* generic_forward(const Problem& p, const DeviceExecutor& executor) {
  return generic(p.dtype).forward(p, executor);
}
const char* generic_backward(const Problem& p, const DeviceExecutor& executor) {
  return generic(p.dtype).backward(p, executor);
}

const DeviceKernel kKernels[] = {
    {"generic", generic_why_not, generic_workspace, generic_forward, generic_backward},
};
constexpr int kCount = sizeof(kKernels) / sizeof(kKernels[0]);

}  // namespace

DeviceKernelTable cuda_kernels() { return {kKernels, kCount}; }

const DeviceKernel* select_cuda(const Problem& problem, Pass pass) {
  for (const DeviceKernel& kernel : kKernels)
    if (!kernel.why_not(problem, pass)) return &kernel;
  return nullptr;
}

}  // namespace scaledot
