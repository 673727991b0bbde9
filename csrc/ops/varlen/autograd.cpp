// Gradients of scaledot::varlen.
//
//   varlen           scaledot::varlen_recorded if a gradient is recorded; backward: scaledot::varlen_backward, fused
//                    kernels
//   varlen_backward  backward: one scaledot::sdpa_backward for each sequence (ops/varlen/sequences.cpp), differentiated
//   forward mode     one scaledot::sdpa for each sequence
//
// The graph nodes are in ops/varlen/nodes.cpp.
#include <torch/library.h>

#include "ops/common/autograd_node.h"
#include "ops/common/checks.h"
#include "ops/common/op_namespace.h"
#include "ops/common/out.h"
#include "ops/varlen/kernel_call.h"
#include "ops/varlen/nodes.h"
#include "ops/varlen/sequences.h"

namespace scaledot {
namespace {

// Quantised keys and values are for inference: nothing of such a call has a gradient.
void check_quantised_needs_no_grad(const VarlenInputs& in) {
  if (!is_quantised(in.key) && !is_quantised(in.value)) return;
  const auto check = [](const char* name, const Tensor* tensor) {
    if (!tensor) return;
    const bool grad = at::GradMode::is_enabled() && requires_grad(*tensor);
    TORCH_CHECK_NOT_IMPLEMENTED(!grad && !has_tangent(*tensor), name, ": got a tensor that ",
                                grad ? "requires grad" : "has a tangent", " in a call with quantised keys and values",
                                "; needs torch.no_grad() or detach(), as there is no gradient through such a cache");
  };
  check("query", &in.query);
  check("key", &in.key);
  check("value", &in.value);
  check("relative_bias", present(in.relative_bias));
  check("k_scale", present(in.k_scale));
  check("v_scale", present(in.v_scale));
  check("attn_mask", present(in.attn_mask));
}

bool any_requires_grad(const VarlenInputs& in) {
  check_quantised_needs_no_grad(in);
  if (!at::GradMode::is_enabled()) return false;
  check_slopes_need_no_grad(in.alibi_slopes);
  const bool any = any_input_requires_grad(in);
  TORCH_CHECK_VALUE(!any || !present(in.block_table),
                    "block_table: got a tensor while query, key, value, relative_bias or attn_mask requires grad; "
                    "needs torch.no_grad(), or packed keys and values, as those in pages have no gradient");
  return any;
}

// Runs the call below autograd and gives its results a node.
Tensor3 record(c10::DispatchKeySet keys, const VarlenRecordedArgs& args) {
  Tensor3 results = below_autograd<VarlenRecordedOp>(keys, args);
  record_varlen(results, args);
  return results;
}

Tensor2 varlen_autograd(c10::DispatchKeySet keys, const VarlenArgs& args) {
  const VarlenInputs& in = args.inputs;
  check_not_nested(in.query, in.key, in.value);
  if (any_has_tangent(in)) {
    check_quantised_needs_no_grad(in);
    return varlen_by_sequence(args);
  }
  if (!any_requires_grad(in)) return below_autograd<VarlenOp>(keys, args);
  const Backend* backend = backend_of(in.query.device());
  auto [output, lse, saved] = record(keys, {args, backend && saves_output_low(*backend, args)});
  return {std::move(output), std::move(lse)};
}

// Called where a torch.func transform records a call inside another transform that does.
Tensor3 varlen_recorded_autograd(c10::DispatchKeySet keys, const VarlenRecordedArgs& args) {
  const VarlenInputs& in = args.inputs;
  if (any_has_tangent(in)) {
    auto [output, lse] = varlen_by_sequence(args);
    // The inner transform's backward has tangents too: it goes by sequence and ignores what is saved.
    return {std::move(output), std::move(lse), std::get<2>(below_autograd<VarlenRecordedOp>(keys, args))};
  }
  return any_requires_grad(in) ? record(keys, args) : below_autograd<VarlenRecordedOp>(keys, args);
}

VarlenGradients varlen_backward_autograd(c10::DispatchKeySet keys, const VarlenBackwardArgs& args) {
  const VarlenInputs& in = args.inputs;
  const bool needs_grad = any_requires_grad(in) || (at::GradMode::is_enabled() &&
                                                    (requires_grad(args.grad_output) || requires_grad(args.grad_lse)));
  if (any_has_tangent(in) || has_tangent(args.grad_output) || has_tangent(args.grad_lse))
    return varlen_backward_by_sequence(args);
  VarlenGradients result = below_autograd<VarlenBackwardOp>(keys, args);
  if (needs_grad) record_varlen_backward(result, args);
  return result;
}

// explain_varlen() has no gradient, but refuses what varlen refuses here.
std::string explain_varlen_autograd(const ExplainVarlenArgs& args) {
  const VarlenInputs& in = args.inputs;
  check_not_nested(in.query, in.key, in.value);
  any_requires_grad(in);
  if (const Tensor* out = present(args.out)) check_out_needs_no_grad(*out, in);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call<ExplainVarlenOp>(args);
}

}  // namespace

SCALEDOT_LIBRARY_IMPL(Autograd, m) {
  m.impl("varlen", registered<VarlenOp, &varlen_autograd>());
  m.impl("varlen_out", registered<VarlenOutOp, &out_autograd<VarlenOutOp>>());
  m.impl("varlen_recorded", registered<VarlenRecordedOp, &varlen_recorded_autograd>());
  m.impl("varlen_backward", registered<VarlenBackwardOp, &varlen_backward_autograd>());
  m.impl("explain_varlen", registered<ExplainVarlenOp, &explain_varlen_autograd>());
}

SCALEDOT_LIBRARY_IMPL(ADInplaceOrView, m) {
  m.impl("varlen_out", registered<VarlenOutOp, &out_in_place<VarlenOutOp>>());
}

}  // namespace scaledot
