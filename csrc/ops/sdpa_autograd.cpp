// Gradients of scaledot::sdpa.
//
//   sdpa           backward: scaledot::sdpa_backward, a fused kernel
//   sdpa_backward  backward: the formula of ops/formula.h, differentiated twice; to any order from there on
//   forward mode   the formula itself
#include <ATen/ATen.h>
#include <torch/library.h>

#include <vector>

#include "ops/autograd_node.h"
#include "ops/formula.h"
#include "ops/make_problem.h"

namespace scaledot {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// The tensors of SdpaInputs, saved.
struct SavedInputs {
  SavedVariable query, key, value, attn_mask, alibi_slopes, dropout_seed;

  void save(const SdpaInputs& in) {
    query = SavedVariable(in.query, false);
    key = SavedVariable(in.key, false);
    value = SavedVariable(in.value, false);
    if (in.attn_mask) attn_mask = SavedVariable(in.attn_mask, false);
    if (in.alibi_slopes) alibi_slopes = SavedVariable(in.alibi_slopes, false);
    if (in.dropout_seed) dropout_seed = SavedVariable(in.dropout_seed, false);
  }

  void reset() {
    for (SavedVariable* variable : {&query, &key, &value, &attn_mask, &alibi_slopes, &dropout_seed}) {
      variable->reset_data();
    }
  }
};

// SavedInputs, unpacked; inputs() refers to this.
struct UnpackedInputs {
  Tensor query, key, value;
  OptionalTensor attn_mask, alibi_slopes, dropout_seed;

  explicit UnpackedInputs(const SavedInputs& saved)
      : query(saved.query.unpack()),
        key(saved.key.unpack()),
        value(saved.value.unpack()),
        attn_mask(optional(saved.attn_mask.unpack())),
        alibi_slopes(optional(saved.alibi_slopes.unpack())),
        dropout_seed(optional(saved.dropout_seed.unpack())) {}
  SdpaInputs inputs() const { return {query, key, value, attn_mask, alibi_slopes, dropout_seed}; }
};

struct SdpaBackward : Node {
  SavedInputs inputs;
  SavedVariable output, lse, weights;
  SavedOptions<OptionArgs> options;

  std::string name() const override { return "ScaledotSdpaBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    inputs.reset();
    output.reset_data();
    lse.reset_data();
    weights.reset_data();
  }

  variable_list apply(variable_list&& grads) override;
};

variable_list SdpaBackward::apply(variable_list&& grads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  variable_list result(4);
  const OptionalTensor grad_output = optional(grads[0]), grad_lse = optional(grads[1]);
  const OptionalTensor grad_weights = grads.size() > 2 ? optional(grads[2]) : std::nullopt;
  if (!grad_output && !grad_lse && !grad_weights) return result;

  std::array<bool, 4> wanted;
  for (size_t k = 0; k < wanted.size(); ++k) wanted[k] = task_should_compute_output(k);
  const UnpackedInputs in(inputs);
  const Tensor saved_output = output.unpack(getptr()), saved_lse = lse.unpack(getptr());
  const OptionalTensor saved_weights = optional(weights.unpack(getptr()));
  auto [grad_query, grad_key, grad_value, grad_mask] =
      call_sdpa_backward({grad_output, grad_lse, grad_weights, in.inputs(), saved_output, saved_lse, saved_weights,
                          options.get(), wanted});
  Tensor* const computed[] = {&grad_query, &grad_key, &grad_value, &grad_mask};
  for (size_t k = 0; k < wanted.size(); ++k) {
    if (wanted[k]) result[k] = std::move(*computed[k]);
  }
  return result;
}

// The gradients that sdpa_backward computes, from operations that have derivatives themselves: tangents flow through, and
// with create_graph there is a graph from `tensors` to the four results. `tensors` are grad_output, grad_lse,
// grad_weights, query, key, value, attn_mask; those `wanted` of the last four must require grad.
constexpr size_t kGrads = 3, kInputs = 4;
using GraphInputs = std::array<Tensor, kGrads + kInputs>;

std::array<Tensor, 4> differentiable_backward(const GraphInputs& tensors, const OptionalTensor& alibi_slopes,
                                              const OptionalTensor& dropout_seed, const OptionArgs& options,
                                              std::array<bool, 4> wanted, bool create_graph) {
  const OptionalTensor attn_mask = optional(tensors[kGrads + 3]);
  const auto [output, lse, weights] =
      formula({{tensors[kGrads], tensors[kGrads + 1], tensors[kGrads + 2], attn_mask, alibi_slopes, dropout_seed},
               options,
               tensors[2].defined()});
  variable_list results, grads, inputs;
  const Tensor* const all_results[] = {&output, &lse, &weights};
  for (size_t k = 0; k < kGrads; ++k) {
    if (!tensors[k].defined() || !all_results[k]->requires_grad()) continue;
    results.push_back(*all_results[k]);
    grads.push_back(tensors[k]);
  }
  for (size_t k = 0; k < kInputs; ++k) {
    if (wanted[k]) inputs.push_back(tensors[kGrads + k]);
  }
  std::array<Tensor, 4> gradients;
  if (results.empty() || inputs.empty()) return gradients;
  variable_list computed = torch::autograd::grad(results, inputs, grads, /*retain_graph=*/create_graph, create_graph,
                                                 /*allow_unused=*/true);
  auto next = computed.begin();
  for (size_t k = 0; k < kInputs; ++k) {
    if (wanted[k]) gradients[k] = std::move(*next++);
  }
  return gradients;
}

struct SdpaBackwardBackward : Node {
  SavedVariable grads[kGrads];
  SavedInputs inputs;
  SavedOptions<OptionArgs> options;

  std::string name() const override { return "ScaledotSdpaBackwardBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& grad : grads) grad.reset_data();
    inputs.reset();
  }

  variable_list apply(variable_list&& grad_grads) override;
};

variable_list SdpaBackwardBackward::apply(variable_list&& grad_grads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool create_graph = at::GradMode::is_enabled();
  const at::AutoGradMode grad_mode(true);
  const UnpackedInputs in(inputs);
  std::array<bool, 4> wanted;
  for (size_t k = 0; k < kInputs; ++k) wanted[k] = grad_grads[k].defined();

  GraphInputs tensors;
  for (size_t k = 0; k < kGrads; ++k) tensors[k] = graph_input(grads[k].unpack(), task_should_compute_output(k));
  const Tensor saved[kInputs] = {in.query, in.key, in.value, in.attn_mask.value_or(Tensor())};
  for (size_t k = 0; k < kInputs; ++k) {
    tensors[kGrads + k] = graph_input(saved[k], wanted[k] || task_should_compute_output(kGrads + k));
  }

  const std::array<Tensor, 4> gradients =
      differentiable_backward(tensors, in.alibi_slopes, in.dropout_seed, options.get(), wanted, true);
  variable_list results, result_grads, targets, result(tensors.size());
  for (size_t k = 0; k < kInputs; ++k) {
    if (!gradients[k].defined() || !gradients[k].requires_grad()) continue;
    results.push_back(gradients[k]);
    result_grads.push_back(grad_grads[k]);
  }
  for (size_t k = 0; k < tensors.size(); ++k) {
    if (task_should_compute_output(k)) targets.push_back(tensors[k]);
  }
  if (results.empty() || targets.empty()) return result;
  variable_list computed = torch::autograd::grad(results, targets, result_grads, /*retain_graph=*/create_graph,
                                                 create_graph, /*allow_unused=*/true);
  auto next = computed.begin();
  for (size_t k = 0; k < tensors.size(); ++k) {
    if (task_should_compute_output(k)) result[k] = std::move(*next++);
  }
  return result;
}

bool any_requires_grad(const SdpaInputs& in) {
  if (!at::GradMode::is_enabled()) return false;
  check_slopes_need_no_grad(in.alibi_slopes);
  return requires_grad(in.query) || requires_grad(in.key) || requires_grad(in.value) || requires_grad(in.attn_mask);
}

bool any_has_tangent(const SdpaInputs& in) {
  return has_tangent(in.query) || has_tangent(in.key) || has_tangent(in.value) || has_tangent(in.attn_mask);
}

Tensor3 sdpa_autograd(c10::DispatchKeySet keys, const SdpaArgs& args) {
  const SdpaInputs& in = args.inputs;
  check_strided(in.query, "query");
  check_strided(in.key, "key");
  check_strided(in.value, "value");
  if (any_has_tangent(in)) return formula(args);
  const bool needs_grad = any_requires_grad(in);
  Tensor3 result;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    result = call_sdpa(keys & c10::after_autograd_keyset, args);
  }
  if (!needs_grad) return result;

  const auto node = make_node<SdpaBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(in.query, in.key, in.value, in.attn_mask));
  auto& [output, lse, weights] = result;
  torch::autograd::set_history(output, node);
  torch::autograd::set_history(lse, node);
  if (args.return_weights) torch::autograd::set_history(weights, node);
  node->inputs.save(in);
  node->options.save(args.options);
  node->output = SavedVariable(output, true);
  node->lse = SavedVariable(lse, true);
  if (args.return_weights) node->weights = SavedVariable(weights, true);
  return result;
}

Tensor4 sdpa_backward_autograd(c10::DispatchKeySet keys, const BackwardArgs& args) {
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
                           in.attn_mask.value_or(Tensor())};
    for (size_t k = 0; k < tensors.size(); ++k) {
      tensors[k] = graph_input(tensors[k], k >= kGrads && args.output_mask[k - kGrads]);
    }
    auto gradients =
        differentiable_backward(tensors, in.alibi_slopes, in.dropout_seed, args.options, args.output_mask, needs_grad);
    for (size_t k = 0; k < kInputs; ++k) {
      const Tensor& input = tensors[kGrads + k];
      if (!args.output_mask[k]) gradients[k] = at::empty({0}, (input.defined() ? input : in.query).options());
      if (!gradients[k].defined()) gradients[k] = at::zeros_like(input);
    }
    return {gradients[0], gradients[1], gradients[2], gradients[3]};
  }
  Tensor4 result;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    result = call_sdpa_backward(keys & c10::after_autograd_keyset, args);
  }
  if (!needs_grad) return result;

  check_differentiable(args.options);
  const auto node = make_node<SdpaBackwardBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(args.grad_output, args.grad_lse, args.grad_weights, in.query,
                                                           in.key, in.value, in.attn_mask));
  auto& [grad_query, grad_key, grad_value, grad_mask] = result;
  Tensor* const outputs[] = {&grad_query, &grad_key, &grad_value, &grad_mask};
  for (size_t k = 0; k < kInputs; ++k) {
    torch::autograd::set_history(args.output_mask[k] ? *outputs[k] : Tensor(), node);
  }
  const OptionalTensor* const grads[] = {&args.grad_output, &args.grad_lse, &args.grad_weights};
  for (size_t k = 0; k < kGrads; ++k) {
    if (*grads[k]) node->grads[k] = SavedVariable(*grads[k], false);
  }
  node->inputs.save(in);
  node->options.save(args.options);
  return result;
}

// Nothing to differentiate, but this is where a tensor subclass (a jagged nested tensor) can still be told apart.
std::string explain_autograd(const SdpaArgs& args) {
  check_strided(args.inputs.query, "query");
  check_strided(args.inputs.key, "key");
  check_strided(args.inputs.value, "value");
  any_requires_grad(args.inputs);  // refuses what sdpa refuses
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_explain(args);
}

}  // namespace

TORCH_LIBRARY_IMPL(scaledot, Autograd, m) {
  m.impl("sdpa", &Unbundled<SdpaArgs, &sdpa_autograd, SdpaSignature>::call_with_keys);
  m.impl("sdpa_backward", &Unbundled<BackwardArgs, &sdpa_backward_autograd, BackwardSignature>::call_with_keys);
  // Their results depend on positions and seeds, and have no gradient.
  m.impl("sdpa_mask", torch::CppFunction::makeFallthrough());
  m.impl("dropout_mask", torch::CppFunction::makeFallthrough());
  m.impl("explain", explain_kernel<&explain_autograd>);
}

}  // namespace scaledot
