// The schemas of scaledot::varlen, its backward and its explanation, and the C++ calls into them.
#include "ops/varlen.h"

#include <torch/library.h>

#include "ops/draw_seed.h"
#include "ops/varlen_schema.h"

TORCH_LIBRARY_FRAGMENT(scaledot, m) {
  m.def(
      "varlen(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor? cu_seq_k, Tensor? seqused_k, "
      "Tensor? block_table, Tensor? alibi_slopes, Tensor? dropout_seed, SymInt max_q, SymInt max_k, "
      "float dropout_p=0.0, bool is_causal=False, float? scale=None, bool enable_gqa=False, "
      "str causal_alignment=\"lower_right\", SymInt? window_left=None, SymInt? window_right=None, "
      "float? softcap=None, str pattern=\"none\", SymInt[]? pattern_args=None, SymInt? num_splits=None) "
      "-> (Tensor output, Tensor lse)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
  m.def(
      "varlen_backward(Tensor? grad_output, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
      "Tensor cu_seq_q, Tensor? cu_seq_k, Tensor? seqused_k, Tensor? block_table, Tensor? alibi_slopes, "
      "Tensor? dropout_seed, Tensor output, Tensor lse, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, "
      "float? scale, bool enable_gqa, str causal_alignment, SymInt? window_left, SymInt? window_right, "
      "float? softcap, str pattern, SymInt[]? pattern_args, SymInt? num_splits, bool[3] output_mask) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
  m.def(
      "explain_varlen(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor? cu_seq_k, Tensor? seqused_k, "
      "Tensor? block_table, Tensor? alibi_slopes, Tensor? dropout_seed, SymInt max_q, SymInt max_k, "
      "float dropout_p=0.0, bool is_causal=False, float? scale=None, bool enable_gqa=False, "
      "str causal_alignment=\"lower_right\", SymInt? window_left=None, SymInt? window_right=None, "
      "float? softcap=None, str pattern=\"none\", SymInt[]? pattern_args=None, SymInt? num_splits=None) -> str");
}

namespace scaledot {
namespace {

template <class Call>
auto spread(const VarlenArgs& a, const Call& call) {
  const VarlenInputs& in = a.inputs;
  const VarlenOptionArgs& o = a.options;
  return call(in.query, in.key, in.value, in.cu_seq_q, in.cu_seq_k, in.seqused_k, in.block_table, in.alibi_slopes,
              in.dropout_seed, o.max_q, o.max_k, o.dropout_p, o.is_causal, o.scale, o.enable_gqa, o.causal_alignment,
              o.window_left, o.window_right, o.softcap, o.pattern, o.pattern_args, o.num_splits);
}

template <class Call>
auto spread(const VarlenBackwardArgs& a, const Call& call) {
  const VarlenInputs& in = a.inputs;
  const VarlenOptionArgs& o = a.options;
  return call(a.grad_output, a.grad_lse, in.query, in.key, in.value, in.cu_seq_q, in.cu_seq_k, in.seqused_k,
              in.block_table, in.alibi_slopes, in.dropout_seed, a.output, a.lse, o.max_q, o.max_k, o.dropout_p,
              o.is_causal, o.scale, o.enable_gqa, o.causal_alignment, o.window_left, o.window_right, o.softcap,
              o.pattern, o.pattern_args, o.num_splits, a.output_mask);
}

const auto& varlen_op() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("scaledot::varlen", "").typed<VarlenSignature>();
  return op;
}

const auto& backward_op() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("scaledot::varlen_backward", "").typed<VarlenBackwardSignature>();
  return op;
}

VarlenOptionArgs option_args(c10::SymInt max_q, c10::SymInt max_k, const VarlenOptions& o) {
  return {std::move(max_q), std::move(max_k),   o.dropout_p,   o.is_causal,    o.scale,
          o.enable_gqa,     o.causal_alignment, o.window_left, o.window_right, o.softcap,
          o.pattern,        o.pattern_args,     o.num_splits};
}

}  // namespace

Tensor2 call_varlen(const VarlenArgs& args) {
  return spread(args, [](const auto&... a) { return varlen_op().call(a...); });
}

Tensor2 call_varlen(c10::DispatchKeySet keys, const VarlenArgs& args) {
  return spread(args, [&](const auto&... a) { return varlen_op().redispatch(keys, a...); });
}

Tensor3 call_varlen_backward(const VarlenBackwardArgs& args) {
  return spread(args, [](const auto&... a) { return backward_op().call(a...); });
}

Tensor3 call_varlen_backward(c10::DispatchKeySet keys, const VarlenBackwardArgs& args) {
  return spread(args, [&](const auto&... a) { return backward_op().redispatch(keys, a...); });
}

std::string call_explain_varlen(const VarlenArgs& args) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("scaledot::explain_varlen", "").typed<ExplainVarlenSignature>();
  return spread(args, [&](const auto&... a) { return op.call(a...); });
}

VarlenResult varlen_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seq_q,
                              const OptionalTensor& cu_seq_k, c10::SymInt max_q, c10::SymInt max_k,
                              const VarlenOptions& o) {
  const OptionalTensor seed = draw_seed(o.dropout_seed, o.dropout_p, o.generator, query);
  auto [output, lse] =
      call_varlen({{query, key, value, cu_seq_q, cu_seq_k, o.seqused_k, o.block_table, o.alibi_slopes, seed},
                   option_args(std::move(max_q), std::move(max_k), o)});
  return {std::move(output), std::move(lse)};
}

std::string explain_varlen(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seq_q,
                           const OptionalTensor& cu_seq_k, c10::SymInt max_q, c10::SymInt max_k,
                           const VarlenOptions& o) {
  return call_explain_varlen(
      {{query, key, value, cu_seq_q, cu_seq_k, o.seqused_k, o.block_table, o.alibi_slopes, o.dropout_seed},
       option_args(std::move(max_q), std::move(max_k), o)});
}

}  // namespace scaledot
