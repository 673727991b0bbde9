// scaledot::varlen on CUDA. Nothing waits for the device: what cu_seq_q, cu_seq_k, seqused_k and block_table say is not looked at here.
#include <torch/library.h>

#include "ops/varlen_dense.h"

namespace scaledot {
namespace {

Tensor2 varlen_cuda(const VarlenArgs& args) { return varlen_dense(kCudaBackend, args); }
Tensor3 varlen_backward_cuda(const VarlenBackwardArgs& args) { return varlen_backward_dense(kCudaBackend, args); }

}  // namespace

TORCH_LIBRARY_IMPL(scaledot, CUDA, m) {
  m.impl("varlen", varlen_kernel<&varlen_cuda>);
  m.impl("varlen_backward", varlen_backward_kernel<&varlen_backward_cuda>);
}

}  // namespace scaledot
