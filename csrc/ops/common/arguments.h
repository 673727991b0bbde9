// The tensors of a call on dense tensors. Packed sequences are checked, and become a Problem, in the same form.
// docs/extending.md adds one.
#pragma once

#include "ops/common/inputs.h"

namespace scaledot {

// Shapes are those of core/problem.h.
struct SdpaInputs {
  const Tensor& query;
  const Tensor& key;
  const Tensor& value;
  const OptionalTensor& attn_mask = kNoTensor;      // missing: every key is allowed
  const OptionalTensor& alibi_slopes = kNoTensor;   // missing: 0
  const OptionalTensor& dropout_seed = kNoTensor;   // missing: an error with dropout_p > 0
  const OptionalTensor& relative_bias = kNoTensor;  // missing: 0
  // A block mask (ops/sdpa/block_mask.h): both, and the option block_shape, or none.
  const OptionalTensor& blocks = kNoTensor;
  const OptionalTensor& block_bits = kNoTensor;
  // A score function (ops/common/score_program.h): its program, (W,) int64 on the CPU, and what it captures, (N,) in
  // the type of sums, and (M,) int64.
  const OptionalTensor& score_program = kNoTensor;   // missing: no function
  const OptionalTensor& score_numbers = kNoTensor;   // missing: none
  const OptionalTensor& score_integers = kNoTensor;  // missing: none
  const OptionalTensor& key_indices = kNoTensor;     // missing: each row attends to all keys

  auto rows() const {
    return std::tuple{
        input<Differentiable::yes>("query", query),
        input<Differentiable::yes>("key", key),
        input<Differentiable::yes>("value", value),
        input<Differentiable::yes>("attn_mask", attn_mask),
        input("alibi_slopes", alibi_slopes),
        input("dropout_seed", dropout_seed),
        input<Differentiable::yes>("relative_bias", relative_bias),
        input("blocks", blocks, "block_mask"),
        input("block_bits", block_bits, "block_mask"),
        input("score_program", score_program, "score_mod"),
        input<Differentiable::yes>("score_numbers", score_numbers, "score_mod"),
        input("score_integers", score_integers, "score_mod"),
        input("key_indices", key_indices),
    };
  }
};

}  // namespace scaledot
