#include "ops/sdpa/nodes.h"

#include <torch/csrc/autograd/functions/utils.h>

#include "ops/common/fused_node.h"
#include "ops/sdpa/differentiable_backward.h"

namespace scaledot {
namespace {

// The nodes save the inputs first, then what each of them adds.
constexpr size_t kSavedInputs = kInputCount<SdpaInputs>, kInputGradients = kGradients<SdpaInputs>;
enum SavedResult : size_t { kOutput = kSavedInputs, kLse, kWeights, kSaved, kSavedForward };

// The two nodes share this.
struct SdpaNode {
  struct Options {
    AttentionOptions attention;
    std::optional<c10::SymInt> saved_keys;
  };

  template <class Options, class Visit>
  static void each(Options& options, const Visit& visit) {
    for_each_option<kSdpa>(options.attention, [&](const auto&, auto& value) { visit(value); });
    visit(options.saved_keys);
  }
};

struct SdpaBackward : SdpaNode {
  static constexpr const char* kName = "ScaledotSdpaBackward";
  static constexpr size_t kSaved = kSavedForward;
  static constexpr size_t kFirstResult = kOutput;
  static constexpr size_t kEdges = kInputGradients;
  static constexpr bool kTraced = true;

  static variable_list apply(const variable_list& grads, const std::array<Tensor, kSaved>& saved,
                             const Options& options, const std::array<bool, kEdges>& wanted) {
    variable_list result(kEdges);
    const OptionalTensor grad_output = optional(grads[0]), grad_lse = optional(grads[1]);
    OptionalTensor grad_weights = grads.size() > 2 ? optional(grads[2]) : std::nullopt;
    if (!grad_output && !grad_lse && !grad_weights) return result;

    const InputsOf<SdpaInputs> unpacked(saved);
    OptionalTensor weights = optional(saved[kWeights]);
    const OptionalTensor for_backward = optional(saved[SavedResult::kSaved]);
    if (grad_weights && grad_weights->dim() < saved[kOutput].dim()) {
      // Rare: averaged weights with a gradient. The weights of each head are recomputed here, so that no forward has to
      // store them.
      {
        const at::NoGradGuard no_grad;
        weights = std::get<2>(
            call<SdpaOp>({unpacked.inputs, options.attention, /*return_weights=*/true, /*average_weights=*/false}));
      }
      const at::Scalar heads(saved[kOutput].sym_size(-3));
      grad_weights = grad_weights->div(heads).unsqueeze(-3).expand_symint(weights->sym_sizes());
    }
    SdpaGradients computed =
        call<SdpaBackwardOp>({grad_output, grad_lse, grad_weights, unpacked.inputs, saved[kOutput], saved[kLse],
                              weights, for_backward, options.attention, options.saved_keys, wanted});
    for (size_t k = 0; k < kEdges; ++k) {
      if (wanted[k]) result[k] = std::move(*pointers_to(computed)[k]);
    }
    return result;
  }
};

struct SdpaBackwardBackward : SdpaNode {
  static constexpr const char* kName = "ScaledotSdpaBackwardBackward";
  static constexpr size_t kSaved = kSavedInputs + kGrads;  // then grad_output, grad_lse, grad_weights
  static constexpr size_t kFirstResult = kSaved;
  static constexpr size_t kEdges = kGrads + kInputGradients;
  static constexpr bool kTraced = false;

  static variable_list apply(const variable_list& grad_grads, const std::array<Tensor, kSaved>& saved,
                             const Options& options, const std::array<bool, kEdges>& wanted) {
    const bool create_graph = at::GradMode::is_enabled();
    const at::AutoGradMode grad_mode(true);
    OutputMask<SdpaInputs> given;
    for (size_t k = 0; k < kInputGradients; ++k) given[k] = grad_grads[k].defined();

    GraphInputs tensors;
    for (size_t k = 0; k < kGrads; ++k) tensors[k] = graph_input(saved[kSavedInputs + k], wanted[k]);
    for (size_t k = 0; k < kInputGradients; ++k) {
      tensors[kGrads + k] = graph_input(saved[kDifferentiable<SdpaInputs>[k]], given[k] || wanted[kGrads + k]);
    }

    const InputsOf<SdpaInputs> constants(saved);
    const auto gradients =
        differentiable_backward(tensors, constants.inputs, options.attention, given, /*create_graph=*/true);
    return gradients_of(gradients, grad_grads, tensors, wanted, create_graph);
  }
};

}  // namespace

void record_sdpa(Tensor4& results, const SdpaRecordedArgs& args) {
  const SdpaInputs& in = args.inputs;
  const auto node = make_node<FusedNode<SdpaBackward>>();
  node->set_next_edges(edges_of(in));
  auto& [output, lse, weights, saved] = results;
  torch::autograd::set_history(output, node);
  torch::autograd::set_history(lse, node);
  if (args.return_weights) torch::autograd::set_history(weights, node);
  node->save_all(all_of(in));
  node->save(kOutput, output);
  node->save(kLse, lse);
  if (args.return_weights && !args.average_weights) node->save(kWeights, weights);
  if (args.saves()) node->save(kSaved, saved);
  node->options = {args.options, args.saved_keys};
}

void record_sdpa_backward(SdpaGradients& results, const SdpaBackwardArgs& args) {
  const SdpaInputs& in = args.inputs;
  const auto node = make_node<FusedNode<SdpaBackwardBackward>>();
  node->set_next_edges(edges_of(in, args.grad_output, args.grad_lse, args.grad_weights));
  for (size_t k = 0; k < kInputGradients; ++k) {
    torch::autograd::set_history(args.output_mask[k] ? *pointers_to(results)[k] : Tensor(), node);
  }
  node->save_all(all_of(in));
  const OptionalTensor* const grads[] = {&args.grad_output, &args.grad_lse, &args.grad_weights};
  for (size_t k = 0; k < kGrads; ++k) node->save(kSavedInputs + k, *grads[k]);
  node->options = {args.options, std::nullopt};
}

}  // namespace scaledot
