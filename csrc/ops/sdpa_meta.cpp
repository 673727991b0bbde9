// The ops on meta and fake tensors: the same checks, the same shapes and strides, no data. Sizes may be symbolic.
#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include "ops/make_problem.h"

namespace scaledot {
namespace {

using SymShapes = Shapes<c10::SymInt>;

Tensor empty(c10::SymIntArrayRef sizes, const Tensor& like, at::ScalarType type) {
  return at::empty_symint(sizes, like.options().dtype(type));
}

// As Gradient in ops/sdpa_cpu.cpp.
Tensor gradient(bool wanted, const Tensor& input, const SymShapes::Vector& shape) {
  if (!wanted) return empty(c10::SymInt(0), input, input.scalar_type());
  if (input.sym_sizes() != c10::SymIntArrayRef(shape)) return empty(input.sym_sizes(), input, input.scalar_type());
  return at::empty_like(input);
}

Tensor3 sdpa_meta(const SdpaArgs& args) {
  const Tensor& query = args.inputs.query;
  check_arguments(args.inputs, args.options);
  const SymShapes shapes = infer_shapes<c10::SymInt>(args.inputs, args.options.enable_gqa);
  const at::ScalarType type = query.scalar_type();
  return {at::empty_strided_symint(shapes.output(), shapes.output_strides(), query.options()),
          empty(shapes.lse(), query, lse_dtype(type)), empty(weights_sizes(args, shapes), query, type)};
}

Tensor4 sdpa_backward_meta(const BackwardArgs& args) {
  const SdpaInputs& in = args.inputs;
  check_arguments(in, args.options);
  const SymShapes shapes = infer_shapes<c10::SymInt>(in, args.options.enable_gqa);
  check_backward(args, shapes);
  return {gradient(args.output_mask[0], in.query, shapes.kernel_query()),
          gradient(args.output_mask[1], in.key, shapes.kernel_key()),
          gradient(args.output_mask[2], in.value, shapes.kernel_value()),
          args.output_mask[3] ? empty(in.attn_mask->sym_sizes(), *in.attn_mask, in.attn_mask->scalar_type())
                              : empty(c10::SymInt(0), in.query, at::kFloat)};
}

Tensor2 sdpa_mask_meta(const MaskArgs& args) {
  const MaskShapes<c10::SymInt> shapes = check_mask<c10::SymInt>(args);
  const c10::SymInt attends[] = {shapes.query_length, shapes.key_length};
  return {empty(attends, args.query, at::kBool), empty(shapes.bias, args.query, lse_dtype(args.query.scalar_type()))};
}

Tensor dropout_mask_meta(const DropoutMaskArgs& args) {
  check_dropout_mask(args);
  const c10::SymInt shape[] = {args.batch, args.heads, args.query_length, args.key_length};
  return empty(shape, args.seed, at::kBool);
}

}  // namespace

TORCH_LIBRARY_IMPL(scaledot, Meta, m) {
  m.impl("sdpa", sdpa_kernel<&sdpa_meta>);
  m.impl("sdpa_backward", backward_kernel<&sdpa_backward_meta>);
  m.impl("sdpa_mask", mask_kernel<&sdpa_mask_meta>);
  m.impl("dropout_mask", dropout_mask_kernel<&dropout_mask_meta>);
}

}  // namespace scaledot
