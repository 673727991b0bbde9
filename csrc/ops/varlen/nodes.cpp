#include "ops/varlen/nodes.h"

#include <torch/csrc/autograd/functions/utils.h>

#include "ops/common/fused_node.h"
#include "ops/varlen/sequences.h"

namespace scaledot {
namespace {

constexpr size_t kInputGradients = kGradients<VarlenInputs>;
constexpr size_t kGrads = 2;  // grad_output, grad_lse

// The nodes save the inputs first, then the results.
enum SavedResult : size_t { kOutput = kInputCount<VarlenInputs>, kLse, kSaved, kSavedCall };

// The two nodes share this.
struct VarlenNode {
  struct Options {
    c10::SymInt max_q, max_k;
    AttentionOptions attention;
    std::optional<c10::SymInt> num_splits;
  };

  template <class Options, class Visit>
  static void each(Options& options, const Visit& visit) {
    visit(options.max_q);
    visit(options.max_k);
    for_each_option<kVarlen>(options.attention, [&](const auto&, auto& value) { visit(value); });
    visit(options.num_splits);
  }
};

struct VarlenBackward : VarlenNode {
  static constexpr const char* kName = "ScaledotVarlenBackward";
  static constexpr size_t kSaved = kSavedCall;
  static constexpr size_t kFirstResult = kOutput;
  static constexpr size_t kEdges = kInputGradients;
  static constexpr bool kTraced = true;

  static variable_list apply(const variable_list& grads, const std::array<Tensor, kSaved>& saved,
                             const Options& options, const std::array<bool, kEdges>& wanted) {
    variable_list result(kEdges);
    const OptionalTensor grad_output = optional(grads[0]), grad_lse = optional(grads[1]);
    if (!grad_output && !grad_lse) return result;
    const InputsOf<VarlenInputs> unpacked(saved);
    const OptionalTensor for_backward = optional(saved[SavedResult::kSaved]);
    VarlenGradients computed =
        call<VarlenBackwardOp>({grad_output, grad_lse, unpacked.inputs, saved[kOutput], saved[kLse], for_backward,
                                options.max_q, options.max_k, options.attention, options.num_splits, wanted});
    for (size_t k = 0; k < kEdges; ++k) {
      if (wanted[k]) result[k] = std::move(*pointers_to(computed)[k]);
    }
    return result;
  }
};

// Its edges are grad_output, grad_lse and the inputs that have a gradient.
struct VarlenBackwardBackward : VarlenNode {
  static constexpr const char* kName = "ScaledotVarlenBackwardBackward";
  static constexpr size_t kSaved = kSavedCall + kGrads;
  static constexpr size_t kFirstResult = kSaved;
  static constexpr size_t kEdges = kGrads + kInputGradients;
  static constexpr bool kTraced = false;

  static variable_list apply(const variable_list& grad_grads, const std::array<Tensor, kSaved>& saved,
                             const Options& options, const std::array<bool, kEdges>& wanted) {
    const bool create_graph = at::GradMode::is_enabled();
    const at::AutoGradMode grad_mode(true);
    OutputMask<VarlenInputs> given;
    for (size_t k = 0; k < kInputGradients; ++k) given[k] = grad_grads[k].defined();

    std::array<Tensor, kEdges> tensors;
    for (size_t k = 0; k < kGrads; ++k) tensors[k] = graph_input(saved[kSavedCall + k], wanted[k]);
    for (size_t k = 0; k < kInputGradients; ++k) {
      tensors[kGrads + k] = graph_input(saved[kDifferentiable<VarlenInputs>[k]], given[k] || wanted[kGrads + k]);
    }
    const OptionalTensor grad_output = optional(tensors[0]), grad_lse = optional(tensors[1]);
    std::array<Tensor, kInputCount<VarlenInputs>> inputs;
    std::copy_n(saved.begin(), inputs.size(), inputs.begin());
    for (size_t k = 0; k < kInputGradients; ++k) inputs[kDifferentiable<VarlenInputs>[k]] = tensors[kGrads + k];
    const InputsOf<VarlenInputs> unpacked(inputs);
    const OptionalTensor for_backward = optional(saved[SavedResult::kSaved]);
    const VarlenGradients computed =
        varlen_backward_by_sequence({grad_output, grad_lse, unpacked.inputs, saved[kOutput], saved[kLse], for_backward,
                                     options.max_q, options.max_k, options.attention, options.num_splits, given});
    const auto gradients = std::apply([](const auto&... tensor) { return std::array{tensor...}; }, computed);
    return gradients_of(gradients, grad_grads, tensors, wanted, create_graph);
  }
};

}  // namespace

void record_varlen(Tensor3& results, const VarlenRecordedArgs& args) {
  const VarlenInputs& in = args.inputs;
  const auto node = make_node<FusedNode<VarlenBackward>>();
  node->set_next_edges(edges_of(in));
  auto& [output, lse, saved] = results;
  torch::autograd::set_history(output, node);
  torch::autograd::set_history(lse, node);
  node->save_all(all_of(in));
  node->save(kOutput, output);
  node->save(kLse, lse);
  if (args.save_output_low) node->save(kSaved, saved);
  node->options = {args.max_q, args.max_k, args.options, args.num_splits};
}

void record_varlen_backward(VarlenGradients& results, const VarlenBackwardArgs& args) {
  const VarlenInputs& in = args.inputs;
  const auto node = make_node<FusedNode<VarlenBackwardBackward>>();
  node->set_next_edges(edges_of(in, args.grad_output, args.grad_lse));
  for (size_t k = 0; k < kInputGradients; ++k) {
    torch::autograd::set_history(args.output_mask[k] ? *pointers_to(results)[k] : Tensor(), node);
  }
  node->save_all(all_of(in));
  // The kernels read these. They are functions of the inputs, whose derivatives the node has.
  node->save(kOutput, args.output.detach());
  node->save(kLse, args.lse.detach());
  if (present(args.saved)) node->save(kSaved, args.saved->detach());
  node->save(kSavedCall, args.grad_output);
  node->save(kSavedCall + 1, args.grad_lse);
  node->options = {args.max_q, args.max_k, args.options, args.num_splits};
}

}  // namespace scaledot
