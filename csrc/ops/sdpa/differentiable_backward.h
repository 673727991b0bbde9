// The gradients of scaledot::sdpa from operations that have derivatives themselves: the double backward, and forward
// mode through sdpa_backward, use this in place of its kernel.
#pragma once

#include <array>

#include "ops/common/autograd_node.h"
#include "ops/sdpa/op.h"

namespace scaledot {

constexpr size_t kGrads = 3;
// grad_output, grad_lse, grad_weights and the inputs that have a gradient; undefined where there is none.
using GraphInputs = std::array<Tensor, kGrads + kGradients<SdpaInputs>>;

// The gradients that sdpa_backward computes. Tangents flow through, and with create_graph there is a graph from
// `tensors` to the results. Those `wanted` of the inputs must require grad. `constants` has the inputs that
// have no gradient.
std::array<Tensor, kGradients<SdpaInputs>> differentiable_backward(const GraphInputs& tensors,
                                                                   const SdpaInputs& constants,
                                                                   const AttentionOptions& options,
                                                                   OutputMask<SdpaInputs> wanted, bool create_graph);

}  // namespace scaledot
