// The graph nodes of the ops share this. They are written like the nodes that torch generates, not as a
// torch::autograd::Function, which costs more on a small call and refuses to run under torch.func's transforms.
#pragma once

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <vector>

#include "ops/common/inputs.h"

namespace scaledot {

// From torch 2.13 on a node counts its references itself; before that a shared_ptr did, with torch's deleter.
template <class T>
auto make_node() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, T>) {
    return c10::make_intrusive<T>();
  } else {
    return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
  }
}

// An op's results from the keys below autograd.
template <class Op>
typename Op::Result below_autograd(c10::DispatchKeySet keys, const typename Op::Args& args) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return redispatch<Op>(keys & c10::after_autograd_keyset, args);
}

inline bool requires_grad(const Tensor& tensor) { return tensor.requires_grad(); }
inline bool requires_grad(const OptionalTensor& tensor) {
  return tensor && tensor->defined() && tensor->requires_grad();
}

// An alias of `tensor` that a graph can start from. Query, key and value are often one tensor: as aliases each gets
// its gradient. A tensor from a torch.func transform that has ended still says that it requires grad, but its alias
// does not; so the alias is asked.
inline Tensor graph_input(const Tensor& tensor, bool needs_grad) {
  if (!tensor.defined()) return tensor;
  Tensor result = tensor.view_as(tensor);
  if (needs_grad && !result.requires_grad()) result.set_requires_grad(true);
  return result;
}

inline void check_slopes_need_no_grad(const OptionalTensor& alibi_slopes) {
  TORCH_CHECK_VALUE(!requires_grad(alibi_slopes),
                    "alibi_slopes: got a tensor that requires grad; needs one that does not (to learn slopes, pass "
                    "-slope * |distance| as attn_mask, which has a gradient)");
}

// The gradients of `results` times `grads` for the `wanted` ones of `inputs`; undefined for the others and where there
// is none. Results without a graph or a gradient are left out. With create_graph the gradients have a graph too.
torch::autograd::variable_list gradients_of(at::ArrayRef<Tensor> results, at::ArrayRef<Tensor> grads,
                                            at::ArrayRef<Tensor> inputs, at::ArrayRef<bool> wanted, bool create_graph);

inline bool has_tangent(const OptionalTensor& tensor) { return torch::autograd::isFwGradDefined(tensor); }
inline bool has_tangent(const Tensor& tensor) { return tensor.defined() && tensor._fw_grad(/*level=*/0).defined(); }

// Whether any of the inputs that have a gradient requires one, or has a tangent.
template <class Inputs>
bool any_input_requires_grad(const Inputs& inputs) {
  return std::apply([](const auto&... tensor) { return (requires_grad(tensor) || ...); }, differentiable_of(inputs));
}
template <class Inputs>
bool any_has_tangent(const Inputs& inputs) {
  return std::apply([](const auto&... tensor) { return (has_tangent(tensor) || ...); }, differentiable_of(inputs));
}

// The edges of a node to the `others` and to the inputs that have a gradient.
template <class Inputs, class... Other>
torch::autograd::edge_list edges_of(const Inputs& inputs, const Other&... others) {
  return std::apply([](const auto&... tensor) { return torch::autograd::collect_next_edges(tensor...); },
                    std::tuple_cat(std::tie(others...), differentiable_of(inputs)));
}

// The tensors of a tuple, as an array of pointers.
template <class Tuple>
auto pointers_to(Tuple& tensors) {
  return std::apply([](auto&... tensor) { return std::array{&tensor...}; }, tensors);
}

}  // namespace scaledot
