// The gradients of scaledot::sdpa from operations that have derivatives themselves: what double backward and forward mode
// through sdpa_backward take in place of its kernel.
#pragma once

#include <array>

#include "ops/schema.h"

namespace scaledot {

constexpr size_t kGrads = 3, kInputs = 4;
// grad_output, grad_lse, grad_weights, query, key, value, attn_mask; undefined where there is none.
using GraphInputs = std::array<Tensor, kGrads + kInputs>;

// The four gradients that sdpa_backward computes. Tangents flow through, and with create_graph there is a graph from
// `tensors` to the results. Those `wanted` of the last four tensors must require grad.
std::array<Tensor, kInputs> differentiable_backward(const GraphInputs& tensors, const OptionalTensor& alibi_slopes,
                                                    const OptionalTensor& dropout_seed, const OptionArgs& options,
                                                    std::array<bool, kInputs> wanted, bool create_graph);

// An alias of `tensor` that a graph can start from. Query, key and value are often one tensor: as aliases they get a
// gradient each. The alias of a tensor from a torch.func transform that has ended does not require grad though the
// tensor says that it does, so it is the alias that is asked.
Tensor graph_input(const Tensor& tensor, bool needs_grad);

inline OptionalTensor optional(Tensor tensor) {
  return tensor.defined() ? OptionalTensor(std::move(tensor)) : std::nullopt;
}

}  // namespace scaledot
