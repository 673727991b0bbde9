// Tensors of layouts that no kernel takes get the message of check_strided, which names the argument, in place of the
// dispatcher's, which names only the op.
#include <torch/library.h>

#include "ops/make_problem.h"
#include "ops/varlen_schema.h"

namespace scaledot {
namespace {

template <class Result>
Result refuse(const SdpaArgs& args) {
  check_arguments(args.inputs, args.options);
  TORCH_CHECK_TYPE(false, "query, key and value: got tensors that are not dense; needs dense ones");
}

Tensor4 refuse_backward(const BackwardArgs& args) {
  check_arguments(args.inputs, args.options);
  check_backward(args, infer_shapes<int64_t>(args.inputs, args.options.enable_gqa));
  TORCH_CHECK_TYPE(false, "query, key and value: got tensors that are not dense; needs dense ones");
}

template <class Result>
Result refuse_varlen(const VarlenArgs& args) {
  check_varlen<int64_t>(args.inputs, args.options);
  TORCH_CHECK_TYPE(false, "query, key and value: got tensors that are not dense; needs dense ones");
}

Tensor3 refuse_varlen_backward(const VarlenBackwardArgs& args) {
  check_varlen_backward(args, check_varlen<int64_t>(args.inputs, args.options));
  TORCH_CHECK_TYPE(false, "query, key and value: got tensors that are not dense; needs dense ones");
}

void register_refusals(torch::Library& m) {
  m.impl("sdpa", sdpa_kernel<&refuse<Tensor3>>);
  m.impl("sdpa_backward", backward_kernel<&refuse_backward>);
  m.impl("explain", explain_kernel<&refuse<std::string>>);
  m.impl("varlen", varlen_kernel<&refuse_varlen<Tensor2>>);
  m.impl("explain_varlen", explain_varlen_kernel<&refuse_varlen<std::string>>);
  m.impl("varlen_backward", varlen_backward_kernel<&refuse_varlen_backward>);
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
