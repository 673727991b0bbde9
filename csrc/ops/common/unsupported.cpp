// Tensors of layouts that no kernel takes get an error that names the argument; the dispatcher's names only the op.
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "ops/common/checks.h"
#include "ops/common/shapes.h"
#include "ops/varlen/checks.h"

namespace scaledot {
namespace {

[[noreturn]] void refuse_layout() {
  TORCH_CHECK_TYPE(false, "query, key and value: got tensors that are not dense; needs dense ones");
}

template <class Result>
Result refuse(const SdpaArgs& args) {
  check_arguments(args.inputs, args.options);
  refuse_layout();
}

Tensor4 refuse_backward(const SdpaBackwardArgs& args) {
  check_arguments(args.inputs, args.options);
  check_backward(args, infer_shapes<int64_t>(args.inputs, args.options.enable_gqa));
  refuse_layout();
}

template <class Result>
Result refuse_varlen(const VarlenArgs& args) {
  check_varlen<int64_t>(args);
  refuse_layout();
}

Tensor3 refuse_varlen_backward(const VarlenBackwardArgs& args) {
  check_varlen_backward(args, check_varlen<int64_t>(args.forward()));
  refuse_layout();
}

void register_refusals(torch::Library& m) {
  m.impl("sdpa", registered<SdpaOp, &refuse<Tensor3>>());
  m.impl("sdpa_backward", registered<SdpaBackwardOp, &refuse_backward>());
  m.impl("explain", registered<ExplainOp, &refuse<std::string>>());
  m.impl("varlen", registered<VarlenOp, &refuse_varlen<Tensor2>>());
  m.impl("explain_varlen", registered<ExplainVarlenOp, &refuse_varlen<std::string>>());
  m.impl("varlen_backward", registered<VarlenBackwardOp, &refuse_varlen_backward>());
}

}  // namespace

TORCH_LIBRARY_IMPL(scaledot, SparseCPU, m) { register_refusals(m); }
TORCH_LIBRARY_IMPL(scaledot, SparseCsrCPU, m) { register_refusals(m); }
TORCH_LIBRARY_IMPL(scaledot, MkldnnCPU, m) { register_refusals(m); }
TORCH_LIBRARY_IMPL(scaledot, QuantizedCPU, m) { register_refusals(m); }
TORCH_LIBRARY_IMPL(scaledot, NestedTensorCPU, m) { register_refusals(m); }
TORCH_LIBRARY_IMPL(scaledot, SparseCUDA, m) { register_refusals(m); }
TORCH_LIBRARY_IMPL(scaledot, SparseCsrCUDA, m) { register_refusals(m); }
TORCH_LIBRARY_IMPL(scaledot, NestedTensorCUDA, m) { register_refusals(m); }

}  // namespace scaledot
