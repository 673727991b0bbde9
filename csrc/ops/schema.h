// The ops' arguments as structs, in the order of the schemas in ops/sdpa.cpp, and how the ops are called from C++.
//
// Every kernel takes one struct; Unbundled<...>::call is the function with the schema's long argument list that the
// dispatcher sees. The members are references and views: a struct lives only as long as the call it was made for.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/OptionalArrayRef.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

namespace scaledot {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
// None stands for no numbers: AOTInductor cannot pass an op an empty list.
using SymIntsOrNone = c10::OptionalArrayRef<c10::SymInt>;
inline c10::SymIntArrayRef numbers(const SymIntsOrNone& given) { return given.value_or(c10::SymIntArrayRef()); }

struct SdpaInputs {
  const Tensor& query;
  const Tensor& key;
  const Tensor& value;
  const OptionalTensor& attn_mask;
  const OptionalTensor& alibi_slopes;
  const OptionalTensor& dropout_seed;
};

struct OptionArgs {
  double dropout_p;
  bool is_causal;
  std::optional<double> scale;
  bool enable_gqa;
  std::string_view causal_alignment;
  std::optional<c10::SymInt> window_left;
  std::optional<c10::SymInt> window_right;
  std::optional<double> softcap;
  std::optional<double> masked_score;
  std::string_view pattern;
  SymIntsOrNone pattern_args;
  // None or empty, or where the call lies in a larger attention (Part in core/problem.h): diagonal, row, key, batch, head, heads.
  SymIntsOrNone part;
};

struct SdpaArgs {
  SdpaInputs inputs;
  OptionArgs options;
  bool return_weights;
  bool average_weights;  // the weights returned are the mean over the heads
};

struct BackwardArgs {
  const OptionalTensor& grad_output;
  const OptionalTensor& grad_lse;
  const OptionalTensor& grad_weights;
  SdpaInputs inputs;
  const Tensor& output;
  const Tensor& lse;
  const OptionalTensor& weights;
  OptionArgs options;
  std::array<bool, 4> output_mask;  // query, key, value, attn_mask
};

struct MaskArgs {
  const Tensor& query;
  const Tensor& key;
  const OptionalTensor& alibi_slopes;
  bool is_causal;
  std::string_view causal_alignment;
  std::optional<c10::SymInt> window_left;
  std::optional<c10::SymInt> window_right;
  std::string_view pattern;
  SymIntsOrNone pattern_args;
};

struct DropoutMaskArgs {
  const Tensor& seed;
  c10::SymInt batch;
  c10::SymInt heads;
  c10::SymInt query_length;
  c10::SymInt key_length;
  double dropout_p;
};

using Tensor2 = std::tuple<Tensor, Tensor>;
using Tensor3 = std::tuple<Tensor, Tensor, Tensor>;
using Tensor4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <class Result>
using ForwardSignature = Result(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                const OptionalTensor&, const OptionalTensor&, double, bool, std::optional<double>, bool,
                                std::string_view, std::optional<c10::SymInt>, std::optional<c10::SymInt>,
                                std::optional<double>, std::optional<double>, std::string_view, SymIntsOrNone,
                                SymIntsOrNone, bool, bool);
using SdpaSignature = ForwardSignature<Tensor3>;
using ExplainSignature = ForwardSignature<std::string>;
using BackwardSignature = Tensor4(const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&,
                                  const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                  const OptionalTensor&, const Tensor&, const Tensor&, const OptionalTensor&, double,
                                  bool, std::optional<double>, bool, std::string_view, std::optional<c10::SymInt>,
                                  std::optional<c10::SymInt>, std::optional<double>, std::optional<double>,
                                  std::string_view, SymIntsOrNone, SymIntsOrNone, std::array<bool, 4>);
using MaskSignature = Tensor2(const Tensor&, const Tensor&, const OptionalTensor&, bool, std::string_view,
                              std::optional<c10::SymInt>, std::optional<c10::SymInt>, std::string_view, SymIntsOrNone);
using DropoutMaskSignature = Tensor(const Tensor&, c10::SymInt, c10::SymInt, c10::SymInt, c10::SymInt, double);

// The function that the dispatcher calls: gathers the schema's arguments into a struct for `kernel`.
template <class Bundle, auto kernel, class Signature>
struct Unbundled;
template <class Bundle, auto kernel, class Result, class... Args>
struct Unbundled<Bundle, kernel, Result(Args...)> {
  static Result call(Args... args) { return kernel(Bundle{static_cast<Args&&>(args)...}); }
  static Result call_with_keys(c10::DispatchKeySet keys, Args... args) {
    return kernel(keys, Bundle{static_cast<Args&&>(args)...});
  }
};

template <auto kernel>
constexpr auto sdpa_kernel = &Unbundled<SdpaArgs, kernel, SdpaSignature>::call;
template <auto kernel>
constexpr auto explain_kernel = &Unbundled<SdpaArgs, kernel, ExplainSignature>::call;
template <auto kernel>
constexpr auto backward_kernel = &Unbundled<BackwardArgs, kernel, BackwardSignature>::call;
template <auto kernel>
constexpr auto mask_kernel = &Unbundled<MaskArgs, kernel, MaskSignature>::call;
template <auto kernel>
constexpr auto dropout_mask_kernel = &Unbundled<DropoutMaskArgs, kernel, DropoutMaskSignature>::call;

// Calls through the dispatcher, from the top or (with keys) from below the caller's own key.
Tensor3 call_sdpa(const SdpaArgs& args);
Tensor3 call_sdpa(c10::DispatchKeySet keys, const SdpaArgs& args);
Tensor4 call_sdpa_backward(const BackwardArgs& args);
Tensor4 call_sdpa_backward(c10::DispatchKeySet keys, const BackwardArgs& args);
Tensor2 call_sdpa_mask(const MaskArgs& args);
Tensor call_dropout_mask(const DropoutMaskArgs& args);
std::string call_explain(const SdpaArgs& args);

}  // namespace scaledot
