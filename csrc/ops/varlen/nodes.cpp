#include "ops/varlen/nodes.h"

#include <torch/csrc/autograd/functions/utils.h>

#include "ops/common/fused_node.h"
#include "ops/varlen/sequences.h"

namespace scaledot {
namespace {

constexpr size_t kInputs = 4;  // query, key, value, relative_bias: the inputs that have a gradient
constexpr size_t kGrads = 2;   // grad_output, grad_lse

// Where the nodes save the tensors: first the inputs, in the order of VarlenInputs, then the results.
enum Saved : size_t {
  kQuery,
  kKey,
  kValue,
  kCuSeqQ,
  kCuSeqK,
  kSequsedK,
  kBlockTable,
  kAlibiSlopes,
  kDropoutSeed,
  kRelativeBias,
  kKScale,
  kVScale,
  kOutput,
  kLse,
  kSaved,
  kSavedCall
};

// The inputs that have a gradient, in the order of varlen_backward's results.
constexpr Saved kDifferentiable[kInputs] = {kQuery, kKey, kValue, kRelativeBias};

// What the two nodes share.
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

// VarlenInputs of saved tensors; inputs refers to this.
template <class Tensors>
struct SavedInputs {
  explicit SavedInputs(const Tensors& saved)
      : cu_seq_k(optional(saved[kCuSeqK])),
        seqused_k(optional(saved[kSequsedK])),
        block_table(optional(saved[kBlockTable])),
        alibi_slopes(optional(saved[kAlibiSlopes])),
        dropout_seed(optional(saved[kDropoutSeed])),
        relative_bias(optional(saved[kRelativeBias])),
        k_scale(optional(saved[kKScale])),
        v_scale(optional(saved[kVScale])),
        inputs{saved[kQuery], saved[kKey],  saved[kValue], saved[kCuSeqQ], cu_seq_k, seqused_k,
               block_table,   alibi_slopes, dropout_seed,  relative_bias,  k_scale,  v_scale} {}
  SavedInputs(const SavedInputs&) = delete;

  const OptionalTensor cu_seq_k, seqused_k, block_table, alibi_slopes, dropout_seed, relative_bias, k_scale, v_scale;
  const VarlenInputs inputs;
};

struct VarlenBackward : VarlenNode {
  static constexpr const char* kName = "ScaledotVarlenBackward";
  static constexpr size_t kSaved = kSavedCall;
  static constexpr size_t kFirstResult = kOutput;
  static constexpr size_t kEdges = kInputs;
  static constexpr bool kTraced = true;

  static variable_list apply(const variable_list& grads, const std::array<Tensor, kSaved>& saved,
                             const Options& options, const std::array<bool, kEdges>& wanted) {
    variable_list result(kEdges);
    const OptionalTensor grad_output = optional(grads[0]), grad_lse = optional(grads[1]);
    if (!grad_output && !grad_lse) return result;
    const SavedInputs unpacked(saved);
    const OptionalTensor for_backward = optional(saved[Saved::kSaved]);
    auto [grad_query, grad_key, grad_value, grad_relative_bias] =
        call<VarlenBackwardOp>({grad_output, grad_lse, unpacked.inputs, saved[kOutput], saved[kLse], for_backward,
                                options.max_q, options.max_k, options.attention, options.num_splits, wanted});
    Tensor* const computed[] = {&grad_query, &grad_key, &grad_value, &grad_relative_bias};
    for (size_t k = 0; k < kEdges; ++k) {
      if (wanted[k]) result[k] = std::move(*computed[k]);
    }
    return result;
  }
};

// Its edges are grad_output, grad_lse, query, key, value and relative_bias.
struct VarlenBackwardBackward : VarlenNode {
  static constexpr const char* kName = "ScaledotVarlenBackwardBackward";
  static constexpr size_t kSaved = kSavedCall + kGrads;
  static constexpr size_t kFirstResult = kSaved;
  static constexpr size_t kEdges = kGrads + kInputs;
  static constexpr bool kTraced = false;

  static variable_list apply(const variable_list& grad_grads, const std::array<Tensor, kSaved>& saved,
                             const Options& options, const std::array<bool, kEdges>& wanted) {
    const bool create_graph = at::GradMode::is_enabled();
    const at::AutoGradMode grad_mode(true);
    std::array<bool, kInputs> given;
    for (size_t k = 0; k < kInputs; ++k) given[k] = grad_grads[k].defined();

    std::array<Tensor, kEdges> tensors;
    for (size_t k = 0; k < kGrads; ++k) tensors[k] = graph_input(saved[kSavedCall + k], wanted[k]);
    for (size_t k = 0; k < kInputs; ++k) {
      tensors[kGrads + k] = graph_input(saved[kDifferentiable[k]], given[k] || wanted[kGrads + k]);
    }
    const OptionalTensor grad_output = optional(tensors[0]), grad_lse = optional(tensors[1]);
    const OptionalTensor relative_bias = optional(tensors[kGrads + 3]);
    const SavedInputs unpacked(saved);
    const OptionalTensor for_backward = optional(saved[Saved::kSaved]);
    const auto [grad_query, grad_key, grad_value, grad_relative_bias] = varlen_backward_by_sequence(
        {grad_output, grad_lse,
         unpacked.inputs.with(tensors[kGrads], tensors[kGrads + 1], tensors[kGrads + 2], relative_bias), saved[kOutput],
         saved[kLse], for_backward, options.max_q, options.max_k, options.attention, options.num_splits, given});
    const Tensor gradients[] = {grad_query, grad_key, grad_value, grad_relative_bias};
    return gradients_of(gradients, grad_grads, tensors, wanted, create_graph);
  }
};

}  // namespace

void record_varlen(Tensor3& results, const VarlenRecordedArgs& args) {
  const VarlenInputs& in = args.inputs;
  const auto node = make_node<FusedNode<VarlenBackward>>();
  node->set_next_edges(torch::autograd::collect_next_edges(in.query, in.key, in.value, in.relative_bias));
  auto& [output, lse, saved] = results;
  torch::autograd::set_history(output, node);
  torch::autograd::set_history(lse, node);
  node->save_all(in.all());
  node->save(kOutput, output);
  node->save(kLse, lse);
  if (args.save_output_low) node->save(kSaved, saved);
  node->options = {args.max_q, args.max_k, args.options, args.num_splits};
}

void record_varlen_backward(Tensor4& results, const VarlenBackwardArgs& args) {
  const VarlenInputs& in = args.inputs;
  const auto node = make_node<FusedNode<VarlenBackwardBackward>>();
  node->set_next_edges(torch::autograd::collect_next_edges(args.grad_output, args.grad_lse, in.query, in.key, in.value,
                                                           in.relative_bias));
  auto& [grad_query, grad_key, grad_value, grad_relative_bias] = results;
  Tensor* const outputs[] = {&grad_query, &grad_key, &grad_value, &grad_relative_bias};
  for (size_t k = 0; k < kInputs; ++k) {
    torch::autograd::set_history(args.output_mask[k] ? *outputs[k] : Tensor(), node);
  }
  node->save_all(in.all());
  // The kernels read these. They are functions of the inputs, whose derivatives the node has.
  node->save(kOutput, args.output.detach());
  node->save(kLse, args.lse.detach());
  if (present(args.saved)) node->save(kSaved, args.saved->detach());
  node->save(kSavedCall, args.grad_output);
  node->save(kSavedCall + 1, args.grad_lse);
  node->options = {args.max_q, args.max_k, args.options, args.num_splits};
}

}  // namespace scaledot
