#include "ops/varlen_nodes.h"

#include <torch/csrc/autograd/functions/utils.h>

#include "ops/fused_node.h"
#include "ops/saved_options.h"

namespace scaledot {
namespace {

constexpr size_t kInputs = 3;                    // query, key, value: what has a gradient
constexpr size_t kSavedInputs = 9;               // the tensors of VarlenInputs
constexpr size_t kSavedCall = kSavedInputs + 2;  // and output, lse
constexpr size_t kGrads = 2;                     // grad_output, grad_lse

template <class Node>
void save_inputs(Node& node, const VarlenInputs& in) {
  node.save(0, in.query);
  node.save(1, in.key);
  node.save(2, in.value);
  node.save(3, in.cu_seq_q);
  node.save(4, in.cu_seq_k);
  node.save(5, in.seqused_k);
  node.save(6, in.block_table);
  node.save(7, in.alibi_slopes);
  node.save(8, in.dropout_seed);
}

// VarlenInputs of what save_inputs saved; inputs() refers to this.
class Unpacked {
 public:
  explicit Unpacked(const Tensor* saved) : saved_(saved) {
    for (size_t k = 0; k < optional_.size(); ++k) optional_[k] = optional(saved[kRequired + k]);
  }
  VarlenInputs inputs(const Tensor& query, const Tensor& key, const Tensor& value) const {
    return {query, key, value, saved_[3], optional_[0], optional_[1], optional_[2], optional_[3], optional_[4]};
  }
  VarlenInputs inputs() const { return inputs(saved_[0], saved_[1], saved_[2]); }

 private:
  static constexpr size_t kRequired = 4;
  const Tensor* saved_;
  std::array<OptionalTensor, kSavedInputs - kRequired> optional_;
};

struct VarlenBackward {
  static constexpr const char* kName = "ScaledotVarlenBackward";
  static constexpr size_t kSaved = kSavedCall;
  static constexpr size_t kFirstResult = kSavedInputs;
  static constexpr size_t kEdges = kInputs;
  static constexpr bool kTraced = true;
  using Options = SavedVarlenOptions;

  static variable_list apply(const variable_list& grads, const std::array<Tensor, kSaved>& saved,
                             const VarlenOptionArgs& options, const std::array<bool, kEdges>& wanted) {
    variable_list result(kEdges);
    const OptionalTensor grad_output = optional(grads[0]), grad_lse = optional(grads[1]);
    if (!grad_output && !grad_lse) return result;
    const Unpacked unpacked(saved.data());
    auto [grad_query, grad_key, grad_value] =
        call_varlen_backward({grad_output, grad_lse, unpacked.inputs(), saved[9], saved[10], options, wanted});
    Tensor* const computed[] = {&grad_query, &grad_key, &grad_value};
    for (size_t k = 0; k < kEdges; ++k) {
      if (wanted[k]) result[k] = std::move(*computed[k]);
    }
    return result;
  }
};

// Its edges are grad_output, grad_lse, query, key and value.
struct VarlenBackwardBackward {
  static constexpr const char* kName = "ScaledotVarlenBackwardBackward";
  static constexpr size_t kSaved = kSavedCall + kGrads;
  static constexpr size_t kFirstResult = kSaved;
  static constexpr size_t kEdges = kGrads + kInputs;
  static constexpr bool kTraced = false;
  using Options = SavedVarlenOptions;

  static variable_list apply(const variable_list& grad_grads, const std::array<Tensor, kSaved>& saved,
                             const VarlenOptionArgs& options, const std::array<bool, kEdges>& wanted) {
    const bool create_graph = at::GradMode::is_enabled();
    const at::AutoGradMode grad_mode(true);
    std::array<bool, kInputs> given;
    for (size_t k = 0; k < kInputs; ++k) given[k] = grad_grads[k].defined();

    std::array<Tensor, kEdges> tensors;
    for (size_t k = 0; k < kGrads; ++k) tensors[k] = graph_input(saved[kSavedCall + k], wanted[k]);
    for (size_t k = 0; k < kInputs; ++k) {
      tensors[kGrads + k] = graph_input(saved[k], given[k] || wanted[kGrads + k]);
    }
    const OptionalTensor grad_output = optional(tensors[0]), grad_lse = optional(tensors[1]);
    const Unpacked unpacked(saved.data());
    const auto [grad_query, grad_key, grad_value] =
        varlen_backward_by_sequence({grad_output, grad_lse, unpacked.inputs(tensors[2], tensors[3], tensors[4]),
                                     saved[9], saved[10], options, given});
    const Tensor gradients[] = {grad_query, grad_key, grad_value};
    return gradients_of(gradients, grad_grads, tensors, wanted, create_graph);
  }
};

}  // namespace

void record_varlen(Tensor2& result, const VarlenArgs& args) {
  const VarlenInputs& in = args.inputs;
  const auto node = make_node<FusedNode<VarlenBackward>>();
  node->set_next_edges(torch::autograd::collect_next_edges(in.query, in.key, in.value));
  auto& [output, lse] = result;
  torch::autograd::set_history(output, node);
  torch::autograd::set_history(lse, node);
  save_inputs(*node, in);
  node->save(9, output);
  node->save(10, lse);
  node->options.save(args.options);
}

void record_varlen_backward(Tensor3& result, const VarlenBackwardArgs& args) {
  const VarlenInputs& in = args.inputs;
  const auto node = make_node<FusedNode<VarlenBackwardBackward>>();
  node->set_next_edges(
      torch::autograd::collect_next_edges(args.grad_output, args.grad_lse, in.query, in.key, in.value));
  auto& [grad_query, grad_key, grad_value] = result;
  Tensor* const outputs[] = {&grad_query, &grad_key, &grad_value};
  for (size_t k = 0; k < kInputs; ++k) {
    torch::autograd::set_history(args.output_mask[k] ? *outputs[k] : Tensor(), node);
  }
  save_inputs(*node, in);
  // The kernels read these two; their derivatives are those of the inputs, which they follow from.
  node->save(9, args.output.detach());
  node->save(10, args.lse.detach());
  node->save(kSavedCall, args.grad_output);
  node->save(kSavedCall + 1, args.grad_lse);
  node->options.save(args.options);
}

}  // namespace scaledot
