#include "ops/sdpa_nodes.h"

#include <torch/csrc/autograd/functions/utils.h>

#include "ops/differentiable_backward.h"
#include "ops/fused_node.h"
#include "ops/saved_options.h"

namespace scaledot {
namespace {

constexpr size_t kSavedInputs = 6;

// What both nodes save first.
template <class Node>
void save_inputs(Node& node, const SdpaInputs& in) {
  node.save(0, in.query);
  node.save(1, in.key);
  node.save(2, in.value);
  node.save(3, in.attn_mask);
  node.save(4, in.alibi_slopes);
  node.save(5, in.dropout_seed);
}

struct SdpaBackward {
  static constexpr const char* kName = "ScaledotSdpaBackward";
  static constexpr size_t kSaved = kSavedInputs + 3;  // and output, lse, weights
  static constexpr size_t kFirstResult = kSavedInputs;
  static constexpr size_t kEdges = kInputs;
  static constexpr bool kTraced = true;
  using Options = SavedOptions;

  static variable_list apply(const variable_list& grads, const std::array<Tensor, kSaved>& saved,
                             const OptionArgs& options, const std::array<bool, kEdges>& wanted) {
    variable_list result(kEdges);
    const OptionalTensor grad_output = optional(grads[0]), grad_lse = optional(grads[1]);
    OptionalTensor grad_weights = grads.size() > 2 ? optional(grads[2]) : std::nullopt;
    if (!grad_output && !grad_lse && !grad_weights) return result;

    const OptionalTensor attn_mask = optional(saved[3]), alibi_slopes = optional(saved[4]);
    const OptionalTensor dropout_seed = optional(saved[5]);
    OptionalTensor weights = optional(saved[8]);
    if (grad_weights && grad_weights->dim() < saved[6].dim()) {
      // The mean over the heads has a gradient, as it hardly ever has: only now are the weights of every head stored.
      {
        const at::NoGradGuard no_grad;
        const SdpaInputs inputs = {saved[0], saved[1], saved[2], attn_mask, alibi_slopes, dropout_seed};
        weights = std::get<2>(call_sdpa({inputs, options, /*return_weights=*/true, /*average_weights=*/false}));
      }
      const at::Scalar heads(saved[6].sym_size(-3));
      grad_weights = grad_weights->div(heads).unsqueeze(-3).expand_symint(weights->sym_sizes());
    }
    auto [grad_query, grad_key, grad_value, grad_mask] =
        call_sdpa_backward({grad_output,
                            grad_lse,
                            grad_weights,
                            {saved[0], saved[1], saved[2], attn_mask, alibi_slopes, dropout_seed},
                            saved[6],
                            saved[7],
                            weights,
                            options,
                            wanted});
    Tensor* const computed[] = {&grad_query, &grad_key, &grad_value, &grad_mask};
    for (size_t k = 0; k < kEdges; ++k) {
      if (wanted[k]) result[k] = std::move(*computed[k]);
    }
    return result;
  }
};

struct SdpaBackwardBackward {
  static constexpr const char* kName = "ScaledotSdpaBackwardBackward";
  static constexpr size_t kSaved = kSavedInputs + kGrads;  // and grad_output, grad_lse, grad_weights
  static constexpr size_t kFirstResult = kSaved;
  static constexpr size_t kEdges = kGrads + kInputs;
  static constexpr bool kTraced = false;
  using Options = SavedOptions;

  static variable_list apply(const variable_list& grad_grads, const std::array<Tensor, kSaved>& saved,
                             const OptionArgs& options, const std::array<bool, kEdges>& wanted) {
    const bool create_graph = at::GradMode::is_enabled();
    const at::AutoGradMode grad_mode(true);
    std::array<bool, kInputs> given;
    for (size_t k = 0; k < kInputs; ++k) given[k] = grad_grads[k].defined();

    GraphInputs tensors;
    for (size_t k = 0; k < kGrads; ++k) tensors[k] = graph_input(saved[kSavedInputs + k], wanted[k]);
    for (size_t k = 0; k < kInputs; ++k) {
      tensors[kGrads + k] = graph_input(saved[k], given[k] || wanted[kGrads + k]);
    }

    const std::array<Tensor, kInputs> gradients =
        differentiable_backward(tensors, optional(saved[4]), optional(saved[5]), options, given, true);
    return gradients_of(gradients, grad_grads, tensors, wanted, create_graph);
  }
};

}  // namespace

void record_sdpa(Tensor3& result, const SdpaArgs& args) {
  const SdpaInputs& in = args.inputs;
  const auto node = make_node<FusedNode<SdpaBackward>>();
  node->set_next_edges(torch::autograd::collect_next_edges(in.query, in.key, in.value, in.attn_mask));
  auto& [output, lse, weights] = result;
  torch::autograd::set_history(output, node);
  torch::autograd::set_history(lse, node);
  if (args.return_weights) torch::autograd::set_history(weights, node);
  save_inputs(*node, in);
  node->save(6, output);
  node->save(7, lse);
  if (args.return_weights && !args.average_weights) node->save(8, weights);
  node->options.save(args.options);
}

void record_sdpa_backward(Tensor4& result, const BackwardArgs& args) {
  const SdpaInputs& in = args.inputs;
  const auto node = make_node<FusedNode<SdpaBackwardBackward>>();
  node->set_next_edges(torch::autograd::collect_next_edges(args.grad_output, args.grad_lse, args.grad_weights, in.query,
                                                           in.key, in.value, in.attn_mask));
  auto& [grad_query, grad_key, grad_value, grad_mask] = result;
  Tensor* const outputs[] = {&grad_query, &grad_key, &grad_value, &grad_mask};
  for (size_t k = 0; k < kInputs; ++k) {
    torch::autograd::set_history(args.output_mask[k] ? *outputs[k] : Tensor(), node);
  }
  save_inputs(*node, in);
  const OptionalTensor* const grads[] = {&args.grad_output, &args.grad_lse, &args.grad_weights};
  for (size_t k = 0; k < kGrads; ++k) node->save(kSavedInputs + k, *grads[k]);
  node->options.save(args.options);
}

}  // namespace scaledot
