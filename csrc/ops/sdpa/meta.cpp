// The ops on dense tensors, for meta and fake tensors.
#include "ops/common/meta.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include "ops/common/checks.h"
#include "ops/common/op_namespace.h"
#include "ops/common/out.h"
#include "ops/sdpa/checks.h"

namespace scaledot {
namespace {

using SymShapes = Shapes<c10::SymInt>;

// Has the layout that Gradient of ops/sdpa/kernel_call.cpp gives it.
Tensor gradient(bool wanted, const Tensor& input, const SymShapes::Vector& shape) {
  if (!wanted) return empty_meta(c10::SymInt(0), input, input.scalar_type());
  if (input.sym_sizes() != c10::SymIntArrayRef(shape)) return empty_meta(input.sym_sizes(), input, input.scalar_type());
  return at::empty_like(input);
}

// The gradient of attn_mask or relative_bias.
Tensor unbroadcast_gradient(bool wanted, const OptionalTensor& input, const Tensor& query) {
  return wanted ? empty_meta(input->sym_sizes(), *input, input->scalar_type())
                : empty_meta(c10::SymInt(0), query, at::kFloat);
}

Tensor3 sdpa_meta(const SdpaArgs& args) {
  const Tensor& query = args.inputs.query;
  check_arguments(args.inputs, args.options);
  const SymShapes shapes = infer_shapes<c10::SymInt>(args.inputs, args.options);
  const at::ScalarType type = query.scalar_type();
  return {at::empty_strided_symint(shapes.output(), output_strides(args, shapes), query.options()),
          empty_meta(shapes.lse(), query, lse_dtype(type)), empty_meta(returned_sizes(args, shapes), query, type)};
}

Tensor2 sdpa_out_meta(const SdpaOutArgs& args) {
  const Tensor& query = args.inputs.query;
  check_arguments(args.inputs, args.options);
  const SymShapes shapes = infer_shapes<c10::SymInt>(args.inputs, args.options);
  check_out<c10::SymInt>(args.out, shapes.output(), query);
  const at::ScalarType type = query.scalar_type();
  return {empty_meta(shapes.lse(), query, lse_dtype(type)),
          empty_meta(returned_sizes(args.forward(), shapes), query, type)};
}

Tensor4 sdpa_recorded_meta(const SdpaRecordedArgs& args) {
  auto [output, lse, weights] = sdpa_meta(args);
  const SymShapes shapes = infer_shapes<c10::SymInt>(args.inputs, args.options);
  return {output, lse, weights, empty_meta(saved_sizes(args, shapes), args.inputs.query, saved_dtype(args))};
}

SdpaGradients sdpa_backward_meta(const SdpaBackwardArgs& args) {
  const SdpaInputs& in = args.inputs;
  check_arguments(in, args.options);
  const SymShapes shapes = infer_shapes<c10::SymInt>(in, args.options);
  check_backward(args, shapes);
  return {gradient(args.output_mask[0], in.query, shapes.kernel_query()),
          gradient(args.output_mask[1], in.key, shapes.kernel_key()),
          gradient(args.output_mask[2], in.value, shapes.kernel_value()),
          unbroadcast_gradient(args.output_mask[3], in.attn_mask, in.query),
          unbroadcast_gradient(args.output_mask[4], in.relative_bias, in.query),
          unbroadcast_gradient(args.output_mask[5], in.score_numbers, in.query)};
}

Tensor2 sdpa_mask_meta(const SdpaMaskArgs& args) {
  const MaskShapes<c10::SymInt> shapes = check_mask<c10::SymInt>(args);
  const c10::SymInt attends[] = {shapes.query_length, shapes.key_length};
  return {empty_meta(attends, args.query, at::kBool),
          empty_meta(shapes.bias, args.query, lse_dtype(args.query.scalar_type()))};
}

Tensor dropout_mask_meta(const Tensor& seed, c10::SymInt batch, c10::SymInt heads, c10::SymInt query_length,
                         c10::SymInt key_length, double dropout_p) {
  check_dropout_mask({seed, batch, heads, query_length, key_length, dropout_p});
  const c10::SymInt shape[] = {batch, heads, query_length, key_length};
  return empty_meta(shape, seed, at::kBool);
}

}  // namespace

SCALEDOT_LIBRARY_IMPL(Meta, m) {
  m.impl("sdpa", registered<SdpaOp, &sdpa_meta>());
  m.impl("sdpa_out", registered<SdpaOutOp, &sdpa_out_meta>());
  m.impl("sdpa_recorded", registered<SdpaRecordedOp, &sdpa_recorded_meta>());
  m.impl("sdpa_backward", registered<SdpaBackwardOp, &sdpa_backward_meta>());
  m.impl("sdpa_mask", registered<SdpaMaskOp, &sdpa_mask_meta>());
  m.impl("dropout_mask", &dropout_mask_meta);
}

}  // namespace scaledot
