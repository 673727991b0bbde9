#include "ops/common/autograd_node.h"

namespace scaledot {

using torch::autograd::variable_list;

variable_list gradients_of(at::ArrayRef<Tensor> results, at::ArrayRef<Tensor> grads, at::ArrayRef<Tensor> inputs,
                           at::ArrayRef<bool> wanted, bool create_graph) {
  variable_list starts, start_grads, targets, gradients(inputs.size());
  for (size_t k = 0; k < results.size(); ++k) {
    if (!grads[k].defined() || !results[k].defined() || !results[k].requires_grad()) continue;
    starts.push_back(results[k]);
    start_grads.push_back(grads[k]);
  }
  for (size_t k = 0; k < inputs.size(); ++k) {
    if (wanted[k]) targets.push_back(inputs[k]);
  }
  if (starts.empty() || targets.empty()) return gradients;
  variable_list computed = torch::autograd::grad(starts, targets, start_grads, /*retain_graph=*/create_graph,
                                                 create_graph, /*allow_unused=*/true);
  auto next = computed.begin();
  for (size_t k = 0; k < inputs.size(); ++k) {
    if (wanted[k]) gradients[k] = std::move(*next++);
  }
  return gradients;
}

}  // namespace scaledot
