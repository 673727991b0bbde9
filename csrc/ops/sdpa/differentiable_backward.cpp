#include "ops/sdpa/differentiable_backward.h"

#include <algorithm>

#include "ops/sdpa/formula.h"

namespace scaledot {

std::array<Tensor, kGradients<SdpaInputs>> differentiable_backward(const GraphInputs& tensors,
                                                                   const SdpaInputs& constants,
                                                                   const AttentionOptions& options,
                                                                   OutputMask<SdpaInputs> wanted, bool create_graph) {
  const at::ArrayRef<Tensor> all(tensors), grads = all.slice(0, kGrads), differentiable = all.slice(kGrads);
  auto inputs = tensors_of(constants);
  for (size_t k = 0; k < differentiable.size(); ++k) inputs[kDifferentiable<SdpaInputs>[k]] = differentiable[k];
  const auto [output, lse, weights] = formula({InputsOf<SdpaInputs>(inputs).inputs, options,
                                               /*return_weights=*/tensors[2].defined(), /*average_weights=*/false});
  const Tensor results[] = {output, lse, weights};
  auto computed = gradients_of(results, grads, differentiable, wanted, create_graph);
  std::array<Tensor, kGradients<SdpaInputs>> gradients;
  std::move(computed.begin(), computed.end(), gradients.begin());
  return gradients;
}

}  // namespace scaledot
