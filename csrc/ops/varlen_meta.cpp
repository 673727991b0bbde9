// scaledot::varlen on meta and fake tensors: the same checks but for those of numbers that have to be read, and the same shapes.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/make_problem.h"
#include "ops/varlen_schema.h"

namespace scaledot {
namespace {

Tensor empty(c10::SymIntArrayRef sizes, const Tensor& like, at::ScalarType type) {
  return at::empty_symint(sizes, like.options().dtype(type));
}

Tensor2 varlen_meta(const VarlenArgs& args) {
  const Tensor& query = args.inputs.query;
  const VarlenShapes<c10::SymInt> shapes = check_varlen<c10::SymInt>(args.inputs, args.options);
  const at::ScalarType type = query.scalar_type();
  return {empty(shapes.output(), query, type), empty(shapes.lse(), query, lse_dtype(type))};
}

Tensor3 varlen_backward_meta(const VarlenBackwardArgs& args) {
  const VarlenInputs& in = args.inputs;
  const VarlenShapes<c10::SymInt> shapes = check_varlen<c10::SymInt>(in, args.options);
  check_varlen_backward(args, shapes);
  const c10::SymInt none[] = {0};
  const auto gradient = [&](int k, const Tensor& input) {
    return empty(args.output_mask[k] ? input.sym_sizes() : c10::SymIntArrayRef(none), input, input.scalar_type());
  };
  return {gradient(0, in.query), gradient(1, in.key), gradient(2, in.value)};
}

}  // namespace

TORCH_LIBRARY_IMPL(scaledot, Meta, m) {
  m.impl("varlen", varlen_kernel<&varlen_meta>);
  m.impl("varlen_backward", varlen_backward_kernel<&varlen_backward_meta>);
}

}  // namespace scaledot
