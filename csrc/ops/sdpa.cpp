// The schemas of the scaledot:: ops, and the C++ calls into them.
#include "ops/sdpa.h"

#include <torch/library.h>

#include "ops/draw_seed.h"
#include "ops/schema.h"

// sdpa's outputs have strides that follow from shapes alone; the gradients of sdpa_backward take the strides of their
// inputs, so a compiler must not hand it differently strided copies.
TORCH_LIBRARY(scaledot, m) {
  m.def(
      "sdpa(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, Tensor? alibi_slopes=None, "
      "Tensor? dropout_seed=None, float dropout_p=0.0, bool is_causal=False, float? scale=None, "
      "bool enable_gqa=False, str causal_alignment=\"upper_left\", SymInt? window_left=None, "
      "SymInt? window_right=None, float? softcap=None, float? masked_score=None, str pattern=\"none\", "
      "SymInt[]? pattern_args=None, SymInt[]? part=None, bool return_weights=False, bool average_weights=False) "
      "-> (Tensor output, Tensor lse, Tensor weights)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
  m.def(
      "sdpa_backward(Tensor? grad_output, Tensor? grad_lse, Tensor? grad_weights, Tensor query, Tensor key, "
      "Tensor value, Tensor? attn_mask, Tensor? alibi_slopes, Tensor? dropout_seed, Tensor output, Tensor lse, "
      "Tensor? weights, float dropout_p, bool is_causal, float? scale, bool enable_gqa, str causal_alignment, "
      "SymInt? window_left, SymInt? window_right, float? softcap, float? masked_score, str pattern, "
      "SymInt[]? pattern_args, SymInt[]? part, bool[4] output_mask) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_mask)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides});
  m.def(
      "sdpa_mask(Tensor query, Tensor key, Tensor? alibi_slopes=None, bool is_causal=False, "
      "str causal_alignment=\"upper_left\", SymInt? window_left=None, SymInt? window_right=None, "
      "str pattern=\"none\", SymInt[]? pattern_args=None) -> (Tensor attends, Tensor bias)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "dropout_mask(Tensor seed, SymInt batch, SymInt heads, SymInt query_length, SymInt key_length, "
      "float dropout_p) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "explain(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, Tensor? alibi_slopes=None, "
      "Tensor? dropout_seed=None, float dropout_p=0.0, bool is_causal=False, float? scale=None, "
      "bool enable_gqa=False, str causal_alignment=\"upper_left\", SymInt? window_left=None, "
      "SymInt? window_right=None, float? softcap=None, float? masked_score=None, str pattern=\"none\", "
      "SymInt[]? pattern_args=None, SymInt[]? part=None, bool return_weights=False, bool average_weights=False) "
      "-> str");
}

namespace scaledot {
namespace {

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Each spreads a struct into the schema's argument list; `call` is a function of that list.
template <class Call>
auto spread(const SdpaArgs& a, const Call& call) {
  const SdpaInputs& in = a.inputs;
  const OptionArgs& o = a.options;
  return call(in.query, in.key, in.value, in.attn_mask, in.alibi_slopes, in.dropout_seed, o.dropout_p, o.is_causal,
              o.scale, o.enable_gqa, o.causal_alignment, o.window_left, o.window_right, o.softcap, o.masked_score,
              o.pattern, o.pattern_args, o.part, a.return_weights, a.average_weights);
}

template <class Call>
auto spread(const BackwardArgs& a, const Call& call) {
  const SdpaInputs& in = a.inputs;
  const OptionArgs& o = a.options;
  return call(a.grad_output, a.grad_lse, a.grad_weights, in.query, in.key, in.value, in.attn_mask, in.alibi_slopes,
              in.dropout_seed, a.output, a.lse, a.weights, o.dropout_p, o.is_causal, o.scale, o.enable_gqa,
              o.causal_alignment, o.window_left, o.window_right, o.softcap, o.masked_score, o.pattern, o.pattern_args,
              o.part, a.output_mask);
}

const c10::TypedOperatorHandle<SdpaSignature>& sdpa_op() {
  static const auto op = find<SdpaSignature>("scaledot::sdpa");
  return op;
}

const c10::TypedOperatorHandle<BackwardSignature>& backward_op() {
  static const auto op = find<BackwardSignature>("scaledot::sdpa_backward");
  return op;
}

const OptionalTensor kNone;

OptionArgs option_args(const SdpaOptions& o) {
  return {o.dropout_p,    o.is_causal, o.scale,        o.enable_gqa, o.causal_alignment, o.window_left,
          o.window_right, o.softcap,   o.masked_score, o.pattern,    o.pattern_args,     {}};
}

}  // namespace

Tensor3 call_sdpa(const SdpaArgs& args) {
  return spread(args, [](const auto&... a) { return sdpa_op().call(a...); });
}

Tensor3 call_sdpa(c10::DispatchKeySet keys, const SdpaArgs& args) {
  return spread(args, [&](const auto&... a) { return sdpa_op().redispatch(keys, a...); });
}

Tensor4 call_sdpa_backward(const BackwardArgs& args) {
  return spread(args, [](const auto&... a) { return backward_op().call(a...); });
}

Tensor4 call_sdpa_backward(c10::DispatchKeySet keys, const BackwardArgs& args) {
  return spread(args, [&](const auto&... a) { return backward_op().redispatch(keys, a...); });
}

Tensor2 call_sdpa_mask(const MaskArgs& a) {
  static const auto op = find<MaskSignature>("scaledot::sdpa_mask");
  return op.call(a.query, a.key, a.alibi_slopes, a.is_causal, a.causal_alignment, a.window_left, a.window_right,
                 a.pattern, a.pattern_args);
}

Tensor call_dropout_mask(const DropoutMaskArgs& a) {
  static const auto op = find<DropoutMaskSignature>("scaledot::dropout_mask");
  return op.call(a.seed, a.batch, a.heads, a.query_length, a.key_length, a.dropout_p);
}

std::string call_explain(const SdpaArgs& args) {
  static const auto op = find<ExplainSignature>("scaledot::explain");
  return spread(args, [&](const auto&... a) { return op.call(a...); });
}

SdpaResult scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                        const SdpaOptions& options) {
  const OptionalTensor seed = draw_seed(options.dropout_seed, options.dropout_p, options.generator, query);
  auto [output, lse, weights] = call_sdpa({{query, key, value, options.attn_mask, options.alibi_slopes, seed},
                                           option_args(options),
                                           options.return_weights,
                                           options.average_weights});
  return {std::move(output), std::move(lse), std::move(weights)};
}

std::string explain(const Tensor& query, const Tensor& key, const Tensor& value, const SdpaOptions& options) {
  return call_explain({{query, key, value, options.attn_mask, options.alibi_slopes, options.dropout_seed},
                       option_args(options),
                       options.return_weights,
                       options.average_weights});
}

}  // namespace scaledot
