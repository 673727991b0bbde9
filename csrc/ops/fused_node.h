// A node of the autograd graph: what it saves, and how torch's engine and torch's compiled autograd run it.
#pragma once

#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <string>
#include <type_traits>
#include <vector>

#include "ops/autograd_node.h"

namespace scaledot {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// `Function` says what a node is:
//   kName, as profilers and grad_fn show it
//   kSaved, how many tensors it saves; from kFirstResult on they are results of its own forward
//   kEdges, how many tensors it has gradients for
//   kTraced, whether compiled autograd may call apply from Python, which holds the GIL: no engine may run in it then
//   Options, what it saves besides tensors, of a type like those of ops/saved_options.h
//   apply(grads, saved, options, wanted), the gradients: of the saved tensors alone, so that it can be traced
template <class Function>
struct FusedNode : torch::autograd::Node {
  using Tensors = std::array<Tensor, Function::kSaved>;
  using Wanted = std::array<bool, Function::kEdges>;
  using Options = typename Function::Options;

  std::array<SavedVariable, Function::kSaved> saved;
  Options options;

  void save(size_t k, const Tensor& tensor) { saved[k] = SavedVariable(tensor, k >= Function::kFirstResult); }
  void save(size_t k, const OptionalTensor& tensor) {
    if (tensor) save(k, *tensor);
  }

  std::string name() const override { return Function::kName; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& variable : saved) variable.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return Function::apply(grads, unpack(), options.get(), wanted());
  }

  // Compiled autograd asks for everything that the node holds, or is told by torch's own error that it cannot be, ...
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    if (!Function::kTraced) return Node::compiled_args(args);
    for (size_t k = 0; k < saved.size(); ++k) args.collect(saved[k], k >= Function::kFirstResult);
    Options::each(options, [&](const auto& option) { args.collect(option); });
  }

  // ... and then puts its own tensors in place of these and wants a call of `apply_packed` in its graph.
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    using namespace torch::dynamo::autograd;
    for (SavedVariable& variable : saved) swap.before(variable);
    Options::each(options, [&](auto& option) { swap.before(option); });

    PackedArgs args;
    for (const Tensor& tensor : unpack()) args.pack(tensor);
    Options::each(options, [&](const auto& option) { args.pack(option); });
    args.pack(wanted());
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
    Options::each(options, [&](auto& option) { swap.after(option); });
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
    Options::each(options, [&](auto& option) { option = args.unpack<std::decay_t<decltype(option)>>(); });
    return Function::apply(grads, tensors, options.get(), args.unpack<Wanted>());
  }

  static std::vector<at::TypePtr> packed_types() {
    using torch::dynamo::autograd::IValuePacker;
    std::vector<at::TypePtr> types(Function::kSaved, IValuePacker<Tensor>::packed_type());
    Options options;
    Options::each(options, [&](const auto& option) {
      types.push_back(IValuePacker<std::decay_t<decltype(option)>>::packed_type());
    });
    types.push_back(IValuePacker<Wanted>::packed_type());
    return types;
  }
};

}  // namespace scaledot
