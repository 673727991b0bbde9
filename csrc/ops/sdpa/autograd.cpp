// Gradients of scaledot::sdpa.
//
//   sdpa           backward: scaledot::sdpa_backward, a fused kernel
//   sdpa_backward  backward: the formula of ops/sdpa/formula.h, differentiated twice; to any order from there on
//   forward mode   the formula itself
//
// The graph nodes are in ops/sdpa/nodes.cpp.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "ops/common/autograd_node.h"
#include "ops/common/checks.h"
#include "ops/common/op_namespace.h"
#include "ops/sdpa/differentiable_backward.h"
#include "ops/sdpa/formula.h"
#include "ops/sdpa/nodes.h"
#include "ops/sdpa/saved.h"

namespace scaledot {
namespace {

bool any_requires_grad(const SdpaInputs& in) {
  if (!at::GradMode::is_enabled()) return false;
  check_slopes_need_no_grad(in.alibi_slopes);
  return requires_grad(in.query) || requires_grad(in.key) || requires_grad(in.value) || requires_grad(in.attn_mask) ||
         requires_grad(in.relative_bias);
}

bool any_has_tangent(const SdpaInputs& in) {
  return has_tangent(in.query) || has_tangent(in.key) || has_tangent(in.value) || has_tangent(in.attn_mask) ||
         has_tangent(in.relative_bias);
}

// The parts of a third result.
WeightsAndOutputLow split_third(const Tensor3& result, const SdpaArgs& args) {
  const auto& [output, lse, third] = result;
  if (!args.options.save_output_low) return {third, {}};
  if (!args.return_weights) return {{}, third};
  const at::AutoDispatchBelowADInplaceOrView below;
  return split_weights(third, returned_sizes(args, infer_shapes<c10::SymInt>(args.inputs, args.options)),
                       output.sym_sizes());
}

Tensor3 sdpa_autograd(c10::DispatchKeySet keys, const SdpaArgs& args) {
  const SdpaInputs& in = args.inputs;
  check_not_nested(in.query, in.key, in.value);
  const auto fused = [&](const SdpaArgs& a) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return redispatch<SdpaOp>(keys & c10::after_autograd_keyset, a);
  };
  if (any_has_tangent(in)) {
    Tensor3 result = formula(args);
    // Asked for by a transform inside this one. Its backward has tangents too and does not read them.
    if (args.options.keeps()) std::get<2>(result) = std::get<2>(fused(args));
    return result;
  }
  if (!any_requires_grad(in)) return fused(args);
  if (const Kept kept = saved_for(args); kept.keys > 0 || kept.output_low) {
    SdpaArgs keeping = args;
    if (kept.keys > 0) keeping.options.saved_keys = kept.keys;
    keeping.options.save_output_low = kept.output_low;
    Tensor3 result = fused(keeping);
    const WeightsAndOutputLow third = split_third(result, keeping);
    std::get<2>(result) = args.return_weights ? third.weights : at::empty({0}, in.query.options());
    record_sdpa(result, keeping, third);
    return result;
  }
  Tensor3 result = fused(args);
  record_sdpa(result, args, split_third(result, args));
  return result;
}

Tensor5 sdpa_backward_autograd(c10::DispatchKeySet keys, const SdpaBackwardArgs& args) {
  const SdpaInputs& in = args.inputs;
  const bool needs_grad =
      any_requires_grad(in) ||
      (at::GradMode::is_enabled() &&
       (requires_grad(args.grad_output) || requires_grad(args.grad_lse) || requires_grad(args.grad_weights)));
  if (any_has_tangent(in) || has_tangent(args.grad_output) || has_tangent(args.grad_lse) ||
      has_tangent(args.grad_weights)) {
    const at::AutoGradMode grad_mode(true);
    GraphInputs tensors = {args.grad_output.value_or(Tensor()),
                           args.grad_lse.value_or(Tensor()),
                           args.grad_weights.value_or(Tensor()),
                           in.query,
                           in.key,
                           in.value,
                           in.attn_mask.value_or(Tensor()),
                           in.relative_bias.value_or(Tensor())};
    for (size_t k = 0; k < tensors.size(); ++k) {
      tensors[k] = graph_input(tensors[k], k >= kGrads && args.output_mask[k - kGrads]);
    }
    auto gradients = differentiable_backward(tensors, in, args.options, args.output_mask, needs_grad);
    for (size_t k = 0; k < kInputs; ++k) {
      const Tensor& input = tensors[kGrads + k];
      if (!args.output_mask[k]) gradients[k] = at::empty({0}, (input.defined() ? input : in.query).options());
      if (!gradients[k].defined()) gradients[k] = at::zeros_like(input);
    }
    return {gradients[0], gradients[1], gradients[2], gradients[3], gradients[4]};
  }
  Tensor5 result;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    result = redispatch<SdpaBackwardOp>(keys & c10::after_autograd_keyset, args);
  }
  if (!needs_grad) return result;
  check_differentiable(args.options);
  record_sdpa_backward(result, args);
  return result;
}

// Nothing to differentiate, but explain() refuses what sdpa refuses here.
std::string explain_autograd(const SdpaArgs& args) {
  check_not_nested(args.inputs.query, args.inputs.key, args.inputs.value);
  any_requires_grad(args.inputs);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call<ExplainOp>(args);
}

}  // namespace

SCALEDOT_LIBRARY_IMPL(Autograd, m) {
  m.impl("sdpa", registered<SdpaOp, &sdpa_autograd>());
  m.impl("sdpa_backward", registered<SdpaBackwardOp, &sdpa_backward_autograd>());
  // Functions of positions and seeds alone: no gradient.
  m.impl("sdpa_mask", torch::CppFunction::makeFallthrough());
  m.impl("dropout_mask", torch::CppFunction::makeFallthrough());
  m.impl("explain", registered<ExplainOp, &explain_autograd>());
}

}  // namespace scaledot
