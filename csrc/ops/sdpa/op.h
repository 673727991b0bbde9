// The ops on dense tensors and their arguments: sdpa, sdpa_backward, explain, sdpa_mask, dropout_mask.
#pragma once

#include "ops/common/op.h"
#include "ops/common/op_namespace.h"

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

struct SdpaArgs {
  SdpaInputs inputs;
  AttentionOptions options;
  bool return_weights;
  bool average_weights;  // the weights returned are the mean over the heads

  auto before() const { return inputs.all(); }
  auto after() const { return std::tie(return_weights, average_weights); }
  SdpaArgs with(const SdpaInputs& others) const { return {others, options, return_weights, average_weights}; }
};

struct SdpaBackwardArgs {
  const OptionalTensor& grad_output;
  const OptionalTensor& grad_lse;
  const OptionalTensor& grad_weights;
  SdpaInputs inputs;
  const Tensor& output;
  const Tensor& lse;
  const OptionalTensor& weights;
  const OptionalTensor& output_low;  // with save_output_low
  AttentionOptions options;
  std::array<bool, 5> output_mask;  // query, key, value, attn_mask, relative_bias

  auto before() const {
    return std::tuple_cat(std::tie(grad_output, grad_lse, grad_weights), inputs.all(),
                          std::tie(output, lse, weights, output_low));
  }
  auto after() const { return std::tie(output_mask); }
};

struct SdpaMaskArgs {
  const Tensor& query;
  const Tensor& key;
  const OptionalTensor& alibi_slopes;
  AttentionOptions options;

  auto before() const { return std::tie(query, key, alibi_slopes); }
  auto after() const { return std::tuple<>(); }
};

struct DropoutMaskArgs {
  const Tensor& seed;
  c10::SymInt batch;
  c10::SymInt heads;
  c10::SymInt query_length;
  c10::SymInt key_length;
  double dropout_p;
};

struct SdpaOp {
  static constexpr const char* kName = SCALEDOT_OP("sdpa");
  static constexpr unsigned kOps = kSdpa;
  using Args = SdpaArgs;
  using Result = Tensor3;  // output, lse, weights
};

struct SdpaBackwardOp {
  static constexpr const char* kName = SCALEDOT_OP("sdpa_backward");
  static constexpr unsigned kOps = kSdpa;
  using Args = SdpaBackwardArgs;
  using Result = Tensor5;  // grad_query, grad_key, grad_value, grad_mask, grad_relative_bias
};

struct ExplainOp {
  static constexpr const char* kName = SCALEDOT_OP("explain");
  static constexpr unsigned kOps = kSdpa;
  using Args = SdpaArgs;
  using Result = std::string;  // JSON
};

struct SdpaMaskOp {
  static constexpr const char* kName = SCALEDOT_OP("sdpa_mask");
  static constexpr unsigned kOps = kSdpaMask;
  using Args = SdpaMaskArgs;
  using Result = Tensor2;  // attends, bias
};

// The calls are compiled once, beside the schemas (ops/sdpa/sdpa.cpp).
extern template Tensor3 call<SdpaOp>(const SdpaArgs&);
extern template Tensor3 redispatch<SdpaOp>(c10::DispatchKeySet, const SdpaArgs&);
extern template Tensor5 call<SdpaBackwardOp>(const SdpaBackwardArgs&);
extern template Tensor5 redispatch<SdpaBackwardOp>(c10::DispatchKeySet, const SdpaBackwardArgs&);
extern template std::string call<ExplainOp>(const SdpaArgs&);
extern template Tensor2 call<SdpaMaskOp>(const SdpaMaskArgs&);

// dropout_mask has no options: its arguments are passed as they are.
using DropoutMaskSignature = Tensor(const Tensor&, c10::SymInt, c10::SymInt, c10::SymInt, c10::SymInt, double);
Tensor call_dropout_mask(const DropoutMaskArgs& args);

}  // namespace scaledot
