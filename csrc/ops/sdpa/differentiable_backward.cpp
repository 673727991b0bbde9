#include "ops/sdpa/differentiable_backward.h"

#include <algorithm>

#include "ops/sdpa/formula.h"

namespace scaledot {

std::array<Tensor, kInputs> differentiable_backward(const GraphInputs& tensors, const SdpaInputs& constants,
                                                    const AttentionOptions& options, std::array<bool, kInputs> wanted,
                                                    bool create_graph) {
  const OptionalTensor attn_mask = optional(tensors[kGrads + 3]), relative_bias = optional(tensors[kGrads + 4]);
  const auto [output, lse, weights] =
      formula({{tensors[kGrads], tensors[kGrads + 1], tensors[kGrads + 2], attn_mask, constants.alibi_slopes,
                constants.dropout_seed, relative_bias, constants.blocks, constants.block_bits},
               options,
               /*return_weights=*/tensors[2].defined(),
               /*average_weights=*/false});
  const Tensor results[] = {output, lse, weights};
  const at::ArrayRef<Tensor> all(tensors);
  auto computed = gradients_of(results, all.slice(0, kGrads), all.slice(kGrads), wanted, create_graph);
  std::array<Tensor, kInputs> gradients;
  std::move(computed.begin(), computed.end(), gradients.begin());
  return gradients;
}

}  // namespace scaledot
