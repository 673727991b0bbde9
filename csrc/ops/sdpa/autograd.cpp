// Gradients of scaledot::sdpa.
//
//   sdpa           scaledot::sdpa_recorded if a gradient is recorded; backward: scaledot::sdpa_backward, a fused kernel
//   sdpa_backward  backward: the formula of ops/sdpa/formula.h, differentiated twice; to any order from there on
//   forward mode   the formula itself
//
// The graph nodes are in ops/sdpa/nodes.cpp.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "ops/common/autograd_node.h"
#include "ops/common/checks.h"
#include "ops/common/op_namespace.h"
#include "ops/common/out.h"
#include "ops/sdpa/differentiable_backward.h"
#include "ops/sdpa/formula.h"
#include "ops/sdpa/nodes.h"
#include "ops/sdpa/saved.h"

namespace scaledot {
namespace {

bool any_requires_grad(const SdpaInputs& in) {
  if (!at::GradMode::is_enabled()) return false;
  check_slopes_need_no_grad(in.alibi_slopes);
  return any_input_requires_grad(in);
}

// Runs the call below autograd and gives its results a node.
Tensor4 record(c10::DispatchKeySet keys, const SdpaRecordedArgs& args) {
  Tensor4 results = below_autograd<SdpaRecordedOp>(keys, args);
  record_sdpa(results, args);
  return results;
}

Tensor3 sdpa_autograd(c10::DispatchKeySet keys, const SdpaArgs& args) {
  const SdpaInputs& in = args.inputs;
  check_not_nested(in.query, in.key, in.value);
  if (any_has_tangent(in)) return formula(args);
  if (!any_requires_grad(in)) return below_autograd<SdpaOp>(keys, args);
  auto [output, lse, weights, saved] = record(keys, recorded(args));
  return {std::move(output), std::move(lse), std::move(weights)};
}

// Called where a torch.func transform records a call inside another transform that does.
Tensor4 sdpa_recorded_autograd(c10::DispatchKeySet keys, const SdpaRecordedArgs& args) {
  const SdpaInputs& in = args.inputs;
  check_not_nested(in.query, in.key, in.value);
  if (any_has_tangent(in)) {
    auto [output, lse, weights] = formula(args);
    // The inner transform's backward has tangents too: it takes the formula and ignores what is saved.
    Tensor saved =
        args.saves() ? std::get<3>(below_autograd<SdpaRecordedOp>(keys, args)) : at::empty({0}, in.query.options());
    return {std::move(output), std::move(lse), std::move(weights), std::move(saved)};
  }
  return any_requires_grad(in) ? record(keys, args) : below_autograd<SdpaRecordedOp>(keys, args);
}

SdpaGradients sdpa_backward_autograd(c10::DispatchKeySet keys, const SdpaBackwardArgs& args) {
  const SdpaInputs& in = args.inputs;
  const bool needs_grad =
      any_requires_grad(in) ||
      (at::GradMode::is_enabled() &&
       (requires_grad(args.grad_output) || requires_grad(args.grad_lse) || requires_grad(args.grad_weights)));
  if (any_has_tangent(in) || has_tangent(args.grad_output) || has_tangent(args.grad_lse) ||
      has_tangent(args.grad_weights)) {
    const at::AutoGradMode grad_mode(true);
    const auto inputs = tensors_of(in);
    GraphInputs tensors = {args.grad_output.value_or(Tensor()), args.grad_lse.value_or(Tensor()),
                           args.grad_weights.value_or(Tensor())};
    for (size_t k = 0; k < kGradients<SdpaInputs>; ++k) tensors[kGrads + k] = inputs[kDifferentiable<SdpaInputs>[k]];
    for (size_t k = 0; k < tensors.size(); ++k) {
      tensors[k] = graph_input(tensors[k], k >= kGrads && args.output_mask[k - kGrads]);
    }
    auto gradients = differentiable_backward(tensors, in, args.options, args.output_mask, needs_grad);
    SdpaGradients results;
    for (size_t k = 0; k < gradients.size(); ++k) {
      const Tensor& input = tensors[kGrads + k];
      if (!args.output_mask[k]) gradients[k] = at::empty({0}, (input.defined() ? input : in.query).options());
      *pointers_to(results)[k] = gradients[k].defined() ? std::move(gradients[k]) : at::zeros_like(input);
    }
    return results;
  }
  SdpaGradients result = below_autograd<SdpaBackwardOp>(keys, args);
  if (!needs_grad) return result;
  check_differentiable(args.inputs, args.options);
  record_sdpa_backward(result, args);
  return result;
}

// explain() has no gradient, but refuses what sdpa refuses here.
std::string explain_autograd(const ExplainArgs& args) {
  check_not_nested(args.inputs.query, args.inputs.key, args.inputs.value);
  any_requires_grad(args.inputs);
  if (const Tensor* out = present(args.out)) check_out_needs_no_grad(*out, args.inputs);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call<ExplainOp>(args);
}

}  // namespace

SCALEDOT_LIBRARY_IMPL(Autograd, m) {
  m.impl("sdpa", registered<SdpaOp, &sdpa_autograd>());
  m.impl("sdpa_out", registered<SdpaOutOp, &out_autograd<SdpaOutOp>>());
  m.impl("sdpa_recorded", registered<SdpaRecordedOp, &sdpa_recorded_autograd>());
  m.impl("sdpa_backward", registered<SdpaBackwardOp, &sdpa_backward_autograd>());
  // Functions of positions and seeds alone: no gradient.
  m.impl("sdpa_mask", torch::CppFunction::makeFallthrough());
  m.impl("dropout_mask", torch::CppFunction::makeFallthrough());
  m.impl("explain", registered<ExplainOp, &explain_autograd>());
}

SCALEDOT_LIBRARY_IMPL(ADInplaceOrView, m) { m.impl("sdpa_out", registered<SdpaOutOp, &out_in_place<SdpaOutOp>>()); }

}  // namespace scaledot
