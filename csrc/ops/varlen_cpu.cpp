// scaledot::varlen on the CPU.
#include <torch/library.h>

#include "ops/varlen_dense.h"

namespace scaledot {
namespace {

Tensor2 varlen_cpu(const VarlenArgs& args) { return varlen_dense(kCpuBackend, args); }
Tensor3 varlen_backward_cpu(const VarlenBackwardArgs& args) { return varlen_backward_dense(kCpuBackend, args); }

}  // namespace

TORCH_LIBRARY_IMPL(scaledot, CPU, m) {
  m.impl("varlen", varlen_kernel<&varlen_cpu>);
  m.impl("varlen_backward", varlen_backward_kernel<&varlen_backward_cpu>);
}

}  // namespace scaledot
