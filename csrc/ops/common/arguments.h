// The tensors of a call on dense tensors. Packed sequences are checked, and become a Problem, in the same form.
#pragma once

#include "ops/common/op.h"

namespace scaledot {

inline const OptionalTensor kNoTensor;

// Shapes are those of core/problem.h.
struct SdpaInputs {
  const Tensor& query;
  const Tensor& key;
  const Tensor& value;
  const OptionalTensor& attn_mask;
  const OptionalTensor& alibi_slopes;
  const OptionalTensor& dropout_seed;
  const OptionalTensor& relative_bias;
  // A block mask (ops/sdpa/block_mask.h): both, and the option block_shape, or none.
  const OptionalTensor& blocks = kNoTensor;
  const OptionalTensor& block_bits = kNoTensor;

  auto all() const {
    return std::tie(query, key, value, attn_mask, alibi_slopes, dropout_seed, relative_bias, blocks, block_bits);
  }
  SdpaInputs with(const Tensor& q, const Tensor& k, const Tensor& v) const {
    return {q, k, v, attn_mask, alibi_slopes, dropout_seed, relative_bias, blocks, block_bits};
  }
};

}  // namespace scaledot
