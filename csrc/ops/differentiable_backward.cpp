#include "ops/differentiable_backward.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "ops/formula.h"

namespace scaledot {

using torch::autograd::variable_list;

std::array<Tensor, kInputs> differentiable_backward(const GraphInputs& tensors, const OptionalTensor& alibi_slopes,
                                                    const OptionalTensor& dropout_seed, const OptionArgs& options,
                                                    std::array<bool, kInputs> wanted, bool create_graph) {
  const OptionalTensor attn_mask = optional(tensors[kGrads + 3]);
  const auto [output, lse, weights] =
      formula({{tensors[kGrads], tensors[kGrads + 1], tensors[kGrads + 2], attn_mask, alibi_slopes, dropout_seed},
               options,
               /*return_weights=*/tensors[2].defined(),
               /*average_weights=*/false});
  variable_list results, grads, inputs;
  const Tensor* const all_results[] = {&output, &lse, &weights};
  for (size_t k = 0; k < kGrads; ++k) {
    if (!tensors[k].defined() || !all_results[k]->requires_grad()) continue;
    results.push_back(*all_results[k]);
    grads.push_back(tensors[k]);
  }
  for (size_t k = 0; k < kInputs; ++k) {
    if (wanted[k]) inputs.push_back(tensors[kGrads + k]);
  }
  std::array<Tensor, kInputs> gradients;
  if (results.empty() || inputs.empty()) return gradients;
  variable_list computed = torch::autograd::grad(results, inputs, grads, /*retain_graph=*/create_graph, create_graph,
                                                 /*allow_unused=*/true);
  auto next = computed.begin();
  for (size_t k = 0; k < kInputs; ++k) {
    if (wanted[k]) gradients[k] = std::move(*next++);
  }
  return gradients;
}

}  // namespace scaledot
