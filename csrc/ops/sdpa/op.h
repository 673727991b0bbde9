// The ops on dense tensors and their arguments: sdpa, sdpa_out, sdpa_recorded, sdpa_backward, explain, sdpa_mask,
// dropout_mask.
#pragma once

#include "ops/common/arguments.h"
#include "ops/common/op_namespace.h"

namespace scaledot {

using SdpaGradients = Gradients<SdpaInputs>;

struct SdpaArgs {
  SdpaInputs inputs;
  AttentionOptions options;
  bool return_weights;
  bool average_weights;                          // the weights returned are the mean over the heads
  std::vector<c10::SymInt> output_strides = {};  // dense, the last of them 1; none: those of Shapes::output_strides

  auto before() const { return all_of(inputs); }
  auto after() const { return std::tie(return_weights, average_weights, output_strides); }
  SdpaArgs with(const SdpaInputs& others) const {
    return {others, options, return_weights, average_weights, output_strides};
  }
};

// A call whose output goes to `out` (ops/common/out.h).
struct SdpaOutArgs {
  const Tensor& out;
  SdpaInputs inputs;
  AttentionOptions options;
  bool return_weights;

  auto before() const { return std::tuple_cat(std::tie(out), all_of(inputs)); }
  auto after() const { return std::tie(return_weights); }
  SdpaArgs forward() const { return {inputs, options, return_weights, /*average_weights=*/false}; }
  SdpaOutArgs with(const SdpaInputs& others) const { return {out, others, options, return_weights}; }
};

// The call that explain() is asked about.
struct ExplainArgs : SdpaArgs {
  const OptionalTensor& out;

  auto after() const { return std::tuple_cat(SdpaArgs::after(), std::tie(out)); }
  ExplainArgs with(const SdpaInputs& others) const { return {SdpaArgs::with(others), out}; }
};

// A call that is recorded for a backward, and what its forward saves besides its results (core/saved.h).
struct SdpaRecordedArgs : SdpaArgs {
  std::optional<c10::SymInt> saved_keys;  // float32 and float64, CPU only: the softmax of the first keys of each row
  bool save_output_low;                   // bfloat16 and float16: the low part of the output

  auto after() const { return std::tuple_cat(SdpaArgs::after(), std::tie(saved_keys, save_output_low)); }
  bool saves() const { return saved_keys || save_output_low; }
};

struct SdpaBackwardArgs {
  const OptionalTensor& grad_output;
  const OptionalTensor& grad_lse;
  const OptionalTensor& grad_weights;
  SdpaInputs inputs;
  const Tensor& output;
  const Tensor& lse;
  const OptionalTensor& weights;  // those that the forward returned
  const OptionalTensor& saved;    // the softmax of saved_keys keys, or without a number the low part of the output
  AttentionOptions options;
  std::optional<c10::SymInt> saved_keys;
  OutputMask<SdpaInputs> output_mask;

  auto before() const {
    return std::tuple_cat(std::tie(grad_output, grad_lse, grad_weights), all_of(inputs),
                          std::tie(output, lse, weights, saved));
  }
  auto after() const { return std::tie(saved_keys, output_mask); }
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

struct SdpaOutOp {
  static constexpr const char* kName = SCALEDOT_OP("sdpa_out");
  static constexpr unsigned kOps = kSdpa;
  using Args = SdpaOutArgs;
  using Result = Tensor2;  // lse, weights
};

struct SdpaRecordedOp {
  static constexpr const char* kName = SCALEDOT_OP("sdpa_recorded");
  static constexpr unsigned kOps = kSdpa;
  using Args = SdpaRecordedArgs;
  using Result = Tensor4;  // output, lse, weights, saved; saved is (0,) where nothing is
};

struct SdpaBackwardOp {
  static constexpr const char* kName = SCALEDOT_OP("sdpa_backward");
  static constexpr unsigned kOps = kSdpa;
  using Args = SdpaBackwardArgs;
  using Result = SdpaGradients;
};

struct ExplainOp {
  static constexpr const char* kName = SCALEDOT_OP("explain");
  static constexpr unsigned kOps = kSdpa;
  using Args = ExplainArgs;
  using Result = std::string;  // JSON
};

struct SdpaMaskOp {
  static constexpr const char* kName = SCALEDOT_OP("sdpa_mask");
  static constexpr unsigned kOps = kSdpaMask;
  using Args = SdpaMaskArgs;
  using Result = Tensor2;  // attends, bias
};

// The calls are compiled once, next to the schemas (ops/sdpa/sdpa.cpp).
extern template Tensor3 call<SdpaOp>(const SdpaArgs&);
extern template Tensor3 redispatch<SdpaOp>(c10::DispatchKeySet, const SdpaArgs&);
extern template Tensor2 call<SdpaOutOp>(const SdpaOutArgs&);
extern template Tensor2 redispatch<SdpaOutOp>(c10::DispatchKeySet, const SdpaOutArgs&);
extern template Tensor4 redispatch<SdpaRecordedOp>(c10::DispatchKeySet, const SdpaRecordedArgs&);
extern template SdpaGradients call<SdpaBackwardOp>(const SdpaBackwardArgs&);
extern template SdpaGradients redispatch<SdpaBackwardOp>(c10::DispatchKeySet, const SdpaBackwardArgs&);
extern template std::string call<ExplainOp>(const ExplainArgs&);
extern template Tensor2 call<SdpaMaskOp>(const SdpaMaskArgs&);

// dropout_mask has no options: its arguments are passed as they are.
using DropoutMaskSignature = Tensor(const Tensor&, c10::SymInt, c10::SymInt, c10::SymInt, c10::SymInt, double);
Tensor call_dropout_mask(const DropoutMaskArgs& args);

}  // namespace scaledot
