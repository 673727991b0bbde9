// A node of the autograd graph: what it saves, and how torch's engine and compiled autograd run it.
#pragma once

#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <string>
#include <type_traits>
#include <vector>

#include "ops/common/autograd_node.h"

namespace scaledot {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// `Function` says what a node is:
//   kName, as profilers and grad_fn show it
//   kSaved, how many tensors it saves; from kFirstResult on they are results of the op itself
//   kEdges, how many tensors it has gradients for
//   kTraced, whether compiled autograd may call apply from Python; it holds the GIL, so apply must not run an engine
//   Options, what it saves besides tensors
//   each(options, visit), which calls visit(member) for every member of them
//   apply(grads, saved, options, wanted), the gradients; a function of its arguments alone, so that it can be traced
template <class Function>
struct FusedNode : torch::autograd::Node {
  using Tensors = std::array<Tensor, Function::kSaved>;
  using Wanted = std::array<bool, Function::kEdges>;
  using PackedWanted = std::vector<bool>;  // as compiled autograd passes it
  using Options = typename Function::Options;

  std::array<SavedVariable, Function::kSaved> saved;
  Options options;

  void save(size_t k, const Tensor& tensor) { saved[k] = SavedVariable(tensor, k >= Function::kFirstResult); }
  void save(size_t k, const OptionalTensor& tensor) {
    if (tensor) save(k, *tensor);
  }

  // Saves a tuple of tensors, from the first place on.
  template <class Tuple>
  void save_all(const Tuple& tensors) {
    std::apply([&, k = size_t(0)](const auto&... tensor) mutable { (save(k++, tensor), ...); }, tensors);
  }

  std::string name() const override { return Function::kName; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& variable : saved) variable.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return Function::apply(grads, unpack(), options, wanted());
  }

  // Compiled autograd collects everything that the node holds; a node that cannot be traced raises torch's own error.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    if (!Function::kTraced) return Node::compiled_args(args);
    for (size_t k = 0; k < saved.size(); ++k) args.collect(saved[k], k >= Function::kFirstResult);
    Function::each(options, [&](const auto& option) { args.collect(option); });
  }

  // It then replaces the saved tensors with its own, and puts a call of `apply_packed` into its graph.
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    using namespace torch::dynamo::autograd;
    for (SavedVariable& variable : saved) swap.before(variable);
    Function::each(options, [&](auto& option) { swap.before(option); });

    PackedArgs args;
    for (const Tensor& tensor : unpack()) args.pack(tensor);
    Function::each(options, [&](const auto& option) { args.pack(option); });
    const Wanted which = wanted();
    args.pack(PackedWanted(which.begin(), which.end()));
    const auto& compiler = getPyCompilerInterface();
    static const bool bound = [&] {
      compiler->bind_function(swap.get_py_compiler(), Function::kName, apply_packed, packed_types());
      return true;
    }();
    static_cast<void>(bound);
    const auto metadata = IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        get_input_metadata(next_edges()));
    variable_list result = compiler->call_function(swap.get_py_compiler(), "apply_functional", Function::kName, grads,
                                                   args.vec(), metadata);

    for (SavedVariable& variable : saved) swap.after(variable);
    Function::each(options, [&](auto& option) { swap.after(option); });
    return result;
  }

 private:
  Tensors unpack() {
    Tensors tensors;
    for (size_t k = 0; k < tensors.size(); ++k) {
      tensors[k] = k < Function::kFirstResult ? saved[k].unpack() : saved[k].unpack(getptr());
    }
    return tensors;
  }

  Wanted wanted() const {
    Wanted result;
    for (size_t k = 0; k < result.size(); ++k) result[k] = task_should_compute_output(k);
    return result;
  }

  static variable_list apply_packed(const variable_list& grads, const std::vector<at::IValue>& packed) {
    torch::dynamo::autograd::PackedArgs args(packed);
    Tensors tensors;
    for (Tensor& tensor : tensors) tensor = args.unpack<Tensor>();
    Options options;
    Function::each(options, [&](auto& option) { option = args.unpack<std::decay_t<decltype(option)>>(); });
    const PackedWanted packed_wanted = args.unpack<PackedWanted>();
    Wanted which{};
    for (size_t k = 0; k < which.size(); ++k) which[k] = packed_wanted[k];
    return Function::apply(grads, tensors, options, which);
  }

  static std::vector<at::TypePtr> packed_types() {
    using torch::dynamo::autograd::IValuePacker;
    std::vector<at::TypePtr> types(Function::kSaved, IValuePacker<Tensor>::packed_type());
    Options options;
    Function::each(options, [&](const auto& option) {
      types.push_back(IValuePacker<std::decay_t<decltype(option)>>::packed_type());
    });
    types.push_back(IValuePacker<PackedWanted>::packed_type());
    return types;
  }
};

}  // namespace scaledot
