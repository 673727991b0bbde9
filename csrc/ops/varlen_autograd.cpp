// Gradients of scaledot::varlen.
//
//   varlen           backward: scaledot::varlen_backward, fused kernels
//   varlen_backward  backward: one scaledot::sdpa_backward for each sequence (ops/varlen_sequences.cpp), differentiated
//   forward mode     one scaledot::sdpa for each sequence
//
// The graph nodes are in ops/varlen_nodes.cpp.
#include <torch/library.h>

#include "ops/autograd_node.h"
#include "ops/make_problem.h"
#include "ops/varlen_nodes.h"

namespace scaledot {
namespace {

bool any_requires_grad(const VarlenInputs& in) {
  if (!at::GradMode::is_enabled()) return false;
  check_slopes_need_no_grad(in.alibi_slopes);
  const bool any = requires_grad(in.query) || requires_grad(in.key) || requires_grad(in.value);
  TORCH_CHECK_VALUE(
      !any || !present(in.block_table),
      "block_table: got a tensor while query, key or value requires grad; keys and values in pages have no "
      "gradient: call under torch.no_grad(), or pass them packed");
  return any;
}

bool any_has_tangent(const VarlenInputs& in) {
  return has_tangent(in.query) || has_tangent(in.key) || has_tangent(in.value);
}

Tensor2 varlen_autograd(c10::DispatchKeySet keys, const VarlenArgs& args) {
  const VarlenInputs& in = args.inputs;
  check_strided(in.query, "query");
  check_strided(in.key, "key");
  check_strided(in.value, "value");
  if (any_has_tangent(in)) return varlen_by_sequence(args);
  const bool needs_grad = any_requires_grad(in);
  Tensor2 result;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    result = call_varlen(keys & c10::after_autograd_keyset, args);
  }
  if (needs_grad) record_varlen(result, args);
  return result;
}

Tensor3 varlen_backward_autograd(c10::DispatchKeySet keys, const VarlenBackwardArgs& args) {
  const VarlenInputs& in = args.inputs;
  const bool needs_grad = any_requires_grad(in) || (at::GradMode::is_enabled() &&
                                                    (requires_grad(args.grad_output) || requires_grad(args.grad_lse)));
  if (any_has_tangent(in) || has_tangent(args.grad_output) || has_tangent(args.grad_lse))
    return varlen_backward_by_sequence(args);
  Tensor3 result;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    result = call_varlen_backward(keys & c10::after_autograd_keyset, args);
  }
  if (needs_grad) record_varlen_backward(result, args);
  return result;
}

// Nothing to differentiate, but this is where a tensor subclass (a jagged nested tensor) can still be told apart.
std::string explain_varlen_autograd(const VarlenArgs& args) {
  const VarlenInputs& in = args.inputs;
  check_strided(in.query, "query");
  check_strided(in.key, "key");
  check_strided(in.value, "value");
  any_requires_grad(in);  // refuses what varlen refuses
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_explain_varlen(args);
}

}  // namespace

TORCH_LIBRARY_IMPL(scaledot, Autograd, m) {
  m.impl("varlen", &Unbundled<VarlenArgs, &varlen_autograd, VarlenSignature>::call_with_keys);
  m.impl("varlen_backward",
         &Unbundled<VarlenBackwardArgs, &varlen_backward_autograd, VarlenBackwardSignature>::call_with_keys);
  m.impl("explain_varlen", explain_varlen_kernel<&explain_varlen_autograd>);
}

}  // namespace scaledot
