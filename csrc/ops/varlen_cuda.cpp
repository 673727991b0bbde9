// scaledot::varlen on CUDA. Nothing waits for the device: what cu_seq_q, cu_seq_k, seqused_k and block_table say is not looked at here.
#include <torch/library.h>

#include "ops/explain.h"
#include "ops/run_cuda.h"
#include "ops/varlen_dense.h"

namespace scaledot {
namespace {

Tensor2 varlen_cuda(const VarlenArgs& args) { return varlen_dense(kCudaBackend, args); }
Tensor3 varlen_backward_cuda(const VarlenBackwardArgs& args) { return varlen_backward_dense(kCudaBackend, args); }

// One kernel for all sequences, whatever their lengths.
void write_pass_cuda(std::ostringstream& json, const Problem& packed, Pass pass) {
  SequenceChoices choices;
  int64_t workspace_bytes = 0;
  if (has_scores(packed)) {
    const DeviceKernel& chosen = choose_cuda(packed, pass);
    choices.add(cuda_kernels(), chosen, packed, pass, packed.batch);
    workspace_bytes = chosen.workspace(packed, pass);
  }
  choices.write(json, workspace_bytes, pass);
}

std::string explain_varlen_cuda(const VarlenArgs& args) {
  const CurrentDevice current(args.inputs.query.device());
  return explain_varlen_dense(kCudaBackend, args, &write_pass_cuda, "cuda", kCudaStatus);
}

}  // namespace

TORCH_LIBRARY_IMPL(scaledot, CUDA, m) {
  m.impl("varlen", varlen_kernel<&varlen_cuda>);
  m.impl("varlen_backward", varlen_backward_kernel<&varlen_backward_cuda>);
  m.impl("explain_varlen", explain_varlen_kernel<&explain_varlen_cuda>);
}

}  // namespace scaledot
