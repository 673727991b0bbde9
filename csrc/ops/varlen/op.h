// The ops on packed sequences and their arguments: varlen, varlen_out, varlen_recorded, varlen_backward,
// explain_varlen.
#pragma once

#include "ops/common/inputs.h"
#include "ops/common/op_namespace.h"

namespace scaledot {

// The tensors that scaledot::varlen_attention describes (ops/varlen/varlen.h).
struct VarlenInputs {
  const Tensor& query;
  const Tensor& key;
  const Tensor& value;
  const Tensor& cu_seq_q;
  const OptionalTensor& cu_seq_k;      // missing: keys are in pages
  const OptionalTensor& seqused_k;     // missing: all keys
  const OptionalTensor& block_table;   // missing: keys are packed as queries are
  const OptionalTensor& alibi_slopes;  // these three as in SdpaInputs
  const OptionalTensor& dropout_seed;
  const OptionalTensor& relative_bias;
  const OptionalTensor& k_scale;  // missing: 1
  const OptionalTensor& v_scale;
  const OptionalTensor& attn_mask;  // missing: every key is allowed

  auto rows() const {
    return std::tuple{
        input<Differentiable::yes>("query", query),
        input<Differentiable::yes>("key", key),
        input<Differentiable::yes>("value", value),
        input("cu_seq_q", cu_seq_q),
        input("cu_seq_k", cu_seq_k),
        input("seqused_k", seqused_k),
        input("block_table", block_table),
        input("alibi_slopes", alibi_slopes),
        input("dropout_seed", dropout_seed),
        input<Differentiable::yes>("relative_bias", relative_bias),
        input("k_scale", k_scale),
        input("v_scale", v_scale),
        input<Differentiable::yes>("attn_mask", attn_mask),
    };
  }
};

using VarlenGradients = Gradients<VarlenInputs>;

struct VarlenArgs {
  VarlenInputs inputs;
  c10::SymInt max_q;
  c10::SymInt max_k;
  AttentionOptions options;
  std::optional<c10::SymInt> num_splits;

  auto before() const { return std::tuple_cat(all_of(inputs), std::tie(max_q, max_k)); }
  auto after() const { return std::tie(num_splits); }
  VarlenArgs with(const VarlenInputs& others) const { return {others, max_q, max_k, options, num_splits}; }
};

// A call whose output goes to `out` (ops/common/out.h).
struct VarlenOutArgs {
  const Tensor& out;
  VarlenInputs inputs;
  c10::SymInt max_q;
  c10::SymInt max_k;
  AttentionOptions options;
  std::optional<c10::SymInt> num_splits;

  auto before() const { return std::tuple_cat(std::tie(out), all_of(inputs), std::tie(max_q, max_k)); }
  auto after() const { return std::tie(num_splits); }
  VarlenArgs forward() const { return {inputs, max_q, max_k, options, num_splits}; }
  VarlenOutArgs with(const VarlenInputs& others) const { return {out, others, max_q, max_k, options, num_splits}; }
};

// The call that explain_varlen() is asked about.
struct ExplainVarlenArgs : VarlenArgs {
  const OptionalTensor& out;

  auto after() const { return std::tuple_cat(VarlenArgs::after(), std::tie(out)); }
  ExplainVarlenArgs with(const VarlenInputs& others) const { return {VarlenArgs::with(others), out}; }
};

// A call that is recorded for a backward.
struct VarlenRecordedArgs : VarlenArgs {
  bool save_output_low;  // bfloat16 and float16: the forward saves the low part of the output (core/saved.h)

  auto after() const { return std::tuple_cat(VarlenArgs::after(), std::tie(save_output_low)); }
};

struct VarlenBackwardArgs {
  const OptionalTensor& grad_output;
  const OptionalTensor& grad_lse;
  VarlenInputs inputs;
  const Tensor& output;
  const Tensor& lse;
  const OptionalTensor& saved;  // the low part of the output
  c10::SymInt max_q;
  c10::SymInt max_k;
  AttentionOptions options;
  std::optional<c10::SymInt> num_splits;
  OutputMask<VarlenInputs> output_mask;

  auto before() const {
    return std::tuple_cat(std::tie(grad_output, grad_lse), all_of(inputs), std::tie(output, lse, saved, max_q, max_k));
  }
  auto after() const { return std::tie(num_splits, output_mask); }
  VarlenArgs forward() const { return {inputs, max_q, max_k, options, num_splits}; }
};

struct VarlenOp {
  static constexpr const char* kName = SCALEDOT_OP("varlen");
  static constexpr unsigned kOps = kVarlen;
  using Args = VarlenArgs;
  using Result = Tensor2;  // output, lse
};

struct VarlenOutOp {
  static constexpr const char* kName = SCALEDOT_OP("varlen_out");
  static constexpr unsigned kOps = kVarlen;
  using Args = VarlenOutArgs;
  using Result = Tensor;  // lse
};

struct VarlenRecordedOp {
  static constexpr const char* kName = SCALEDOT_OP("varlen_recorded");
  static constexpr unsigned kOps = kVarlen;
  using Args = VarlenRecordedArgs;
  using Result = Tensor3;  // output, lse, saved; saved is (0,) where nothing is
};

struct VarlenBackwardOp {
  static constexpr const char* kName = SCALEDOT_OP("varlen_backward");
  static constexpr unsigned kOps = kVarlen;
  using Args = VarlenBackwardArgs;
  using Result = VarlenGradients;
};

struct ExplainVarlenOp {
  static constexpr const char* kName = SCALEDOT_OP("explain_varlen");
  static constexpr unsigned kOps = kVarlen;
  using Args = ExplainVarlenArgs;
  using Result = std::string;  // JSON
};

// The calls are compiled once, next to the schemas (ops/varlen/varlen.cpp).
extern template Tensor2 call<VarlenOp>(const VarlenArgs&);
extern template Tensor2 redispatch<VarlenOp>(c10::DispatchKeySet, const VarlenArgs&);
extern template Tensor call<VarlenOutOp>(const VarlenOutArgs&);
extern template Tensor redispatch<VarlenOutOp>(c10::DispatchKeySet, const VarlenOutArgs&);
extern template Tensor3 redispatch<VarlenRecordedOp>(c10::DispatchKeySet, const VarlenRecordedArgs&);
extern template VarlenGradients call<VarlenBackwardOp>(const VarlenBackwardArgs&);
extern template VarlenGradients redispatch<VarlenBackwardOp>(c10::DispatchKeySet, const VarlenBackwardArgs&);
extern template std::string call<ExplainVarlenOp>(const ExplainVarlenArgs&);

}  // namespace scaledot
