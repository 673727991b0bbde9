// Gradients of scaledot::varlen.
//
//   varlen           backward: scaledot::varlen_backward, fused kernels
//   varlen_backward  backward: one scaledot::sdpa_backward for each sequence (ops/varlen_sequences.cpp), differentiated
//   forward mode     one scaledot::sdpa for each sequence
#include <torch/library.h>

#include "ops/autograd_node.h"
#include "ops/make_problem.h"
#include "ops/varlen.h"

namespace scaledot {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// VarlenOptions that own what they point to.
class SavedOptions {
 public:
  void save(const VarlenOptions& options) {
    args_ = options;
    alignment_ = options.causal_alignment;
    pattern_ = options.pattern;
    pattern_args_ = options.pattern_args.vec();
  }
  VarlenOptions get() const {
    VarlenOptions options = args_;
    options.causal_alignment = alignment_;
    options.pattern = pattern_;
    options.pattern_args = pattern_args_;
    return options;
  }

 private:
  VarlenOptions args_{};
  std::string alignment_, pattern_;
  std::vector<c10::SymInt> pattern_args_;
};

// The tensors of VarlenInputs, saved.
struct SavedInputs {
  SavedVariable tensors[9];

  void save(const VarlenInputs& in) {
    size_t k = 0;
    for (const Tensor* tensor : {&in.query, &in.key, &in.value, &in.cu_seq_q})
      tensors[k++] = SavedVariable(*tensor, false);
    for (const OptionalTensor* tensor :
         {&in.cu_seq_k, &in.seqused_k, &in.block_table, &in.alibi_slopes, &in.dropout_seed}) {
      if (present(*tensor)) tensors[k] = SavedVariable(**tensor, false);
      ++k;
    }
  }

  void reset() {
    for (SavedVariable& tensor : tensors) tensor.reset_data();
  }
};

// SavedInputs, unpacked; inputs() refers to this.
struct UnpackedInputs {
  Tensor query, key, value, cu_seq_q;
  OptionalTensor cu_seq_k, seqused_k, block_table, alibi_slopes, dropout_seed;

  explicit UnpackedInputs(const SavedInputs& saved) {
    size_t k = 0;
    for (Tensor* tensor : {&query, &key, &value, &cu_seq_q}) *tensor = saved.tensors[k++].unpack();
    for (OptionalTensor* tensor : {&cu_seq_k, &seqused_k, &block_table, &alibi_slopes, &dropout_seed})
      *tensor = optional(saved.tensors[k++].unpack());
  }
  VarlenInputs inputs() const {
    return {query, key, value, cu_seq_q, cu_seq_k, seqused_k, block_table, alibi_slopes, dropout_seed};
  }
};

struct VarlenBackward : Node {
  SavedInputs inputs;
  SavedVariable output, lse;
  SavedOptions options;

  std::string name() const override { return "ScaledotVarlenBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    inputs.reset();
    output.reset_data();
    lse.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    variable_list result(3);
    const OptionalTensor grad_output = optional(grads[0]), grad_lse = optional(grads[1]);
    if (!grad_output && !grad_lse) return result;
    const UnpackedInputs in(inputs);
    const Tensor saved_output = output.unpack(getptr()), saved_lse = lse.unpack(getptr());
    std::array<bool, 3> wanted;
    for (size_t k = 0; k < wanted.size(); ++k) wanted[k] = task_should_compute_output(k);
    auto [grad_query, grad_key, grad_value] =
        call_varlen_backward({grad_output, grad_lse, in.inputs(), saved_output, saved_lse, options.get(), wanted});
    Tensor* const computed[] = {&grad_query, &grad_key, &grad_value};
    for (size_t k = 0; k < wanted.size(); ++k) {
      if (wanted[k]) result[k] = std::move(*computed[k]);
    }
    return result;
  }
};

// Its edges are grad_output, grad_lse, query, key and value.
struct VarlenBackwardBackward : Node {
  SavedVariable grad_output, grad_lse;
  SavedInputs inputs;
  SavedVariable output, lse;
  SavedOptions options;

  std::string name() const override { return "ScaledotVarlenBackwardBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* saved : {&grad_output, &grad_lse, &output, &lse}) saved->reset_data();
    inputs.reset();
  }

  variable_list apply(variable_list&& grad_grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool create_graph = at::GradMode::is_enabled();
    const at::AutoGradMode grad_mode(true);
    UnpackedInputs in(inputs);
    Tensor saved_grads[] = {grad_output.unpack(), grad_lse.unpack()};
    Tensor* const tensors[] = {&saved_grads[0], &saved_grads[1], &in.query, &in.key, &in.value};
    std::array<bool, 3> wanted;
    for (size_t k = 0; k < wanted.size(); ++k) wanted[k] = grad_grads[k].defined();
    for (size_t k = 0; k < std::size(tensors); ++k)
      *tensors[k] = graph_input(*tensors[k], task_should_compute_output(k) || (k >= 2 && wanted[k - 2]));

    const auto [grad_query, grad_key, grad_value] =
        varlen_backward_by_sequence({optional(saved_grads[0]), optional(saved_grads[1]), in.inputs(), output.unpack(),
                                     lse.unpack(), options.get(), wanted});
    const Tensor* const gradients[] = {&grad_query, &grad_key, &grad_value};
    variable_list results, result_grads, targets, result(std::size(tensors));
    for (size_t k = 0; k < wanted.size(); ++k) {
      if (!wanted[k] || !gradients[k]->requires_grad()) continue;
      results.push_back(*gradients[k]);
      result_grads.push_back(grad_grads[k]);
    }
    for (size_t k = 0; k < std::size(tensors); ++k) {
      if (task_should_compute_output(k)) targets.push_back(*tensors[k]);
    }
    if (results.empty() || targets.empty()) return result;
    variable_list computed = torch::autograd::grad(results, targets, result_grads, /*retain_graph=*/create_graph,
                                                   create_graph, /*allow_unused=*/true);
    auto next = computed.begin();
    for (size_t k = 0; k < std::size(tensors); ++k) {
      if (task_should_compute_output(k)) result[k] = std::move(*next++);
    }
    return result;
  }
};

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
  if (!needs_grad) return result;

  const auto node = make_node<VarlenBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(in.query, in.key, in.value));
  auto& [output, lse] = result;
  torch::autograd::set_history(output, node);
  torch::autograd::set_history(lse, node);
  node->inputs.save(in);
  node->options.save(args.options);
  node->output = SavedVariable(output, true);
  node->lse = SavedVariable(lse, true);
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
  if (!needs_grad) return result;

  const auto node = make_node<VarlenBackwardBackward>();
  node->set_next_edges(
      torch::autograd::collect_next_edges(args.grad_output, args.grad_lse, in.query, in.key, in.value));
  auto& [grad_query, grad_key, grad_value] = result;
  Tensor* const outputs[] = {&grad_query, &grad_key, &grad_value};
  for (size_t k = 0; k < 3; ++k) torch::autograd::set_history(args.output_mask[k] ? *outputs[k] : Tensor(), node);
  if (present(args.grad_output)) node->grad_output = SavedVariable(*args.grad_output, false);
  if (present(args.grad_lse)) node->grad_lse = SavedVariable(*args.grad_lse, false);
  node->inputs.save(in);
  node->output = SavedVariable(args.output.detach(), false);
  node->lse = SavedVariable(args.lse.detach(), false);
  node->options.save(args.options);
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(scaledot, Autograd, m) {
  m.impl("varlen", &Unbundled<VarlenArgs, &varlen_autograd, VarlenSignature>::call_with_keys);
  m.impl("varlen_backward",
         &Unbundled<VarlenBackwardArgs, &varlen_backward_autograd, VarlenBackwardSignature>::call_with_keys);
}

}  // namespace scaledot
