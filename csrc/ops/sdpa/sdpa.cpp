// The schemas of the ops on dense tensors, and the public C++ calls.
#include "ops/sdpa/sdpa.h"

#include <torch/library.h>

#include "ops/common/dropout_seed.h"
#include "ops/common/op_namespace.h"
#include "ops/sdpa/op.h"

// sdpa's outputs have strides that follow from shapes and arguments alone. The gradients of sdpa_backward take the
// strides of their inputs, so a compiler must not hand it copies with other strides.
SCALEDOT_LIBRARY(m) {
  using namespace scaledot;
  const std::string forward = "(" + input_schema<SdpaInputs>(Defaults::yes) + option_schema<kSdpa>({}, Defaults::yes) +
                              ", bool return_weights=False, bool average_weights=False, SymInt[]? output_strides=None";
  const std::string backward =
      "(Tensor? grad_output, Tensor? grad_lse, Tensor? grad_weights, " + input_schema<SdpaInputs>(Defaults::no) +
      ", Tensor output, Tensor lse, Tensor? weights, Tensor? saved" + option_schema<kSdpa>({}, Defaults::no) +
      ", SymInt? saved_keys, " + output_mask_schema<SdpaInputs>() + ") -> ";
  m.def(("sdpa" + forward + ") -> (Tensor output, Tensor lse, Tensor weights)").c_str(),
        {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
  m.def(("sdpa_out(Tensor(a!) out, " + input_schema<SdpaInputs>(Defaults::yes) +
         option_schema<kSdpa>({}, Defaults::yes) + ", bool return_weights=False) -> (Tensor lse, Tensor weights)")
            .c_str(),
        {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
  m.def(("sdpa_recorded" + forward +
         ", SymInt? saved_keys=None, bool save_output_low=False) -> "
         "(Tensor output, Tensor lse, Tensor weights, Tensor saved)")
            .c_str(),
        {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
  m.def(("sdpa_backward" + backward + gradient_schema<SdpaInputs>()).c_str(),
        {at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides});
  m.def(("explain" + forward + ", Tensor? out=None) -> str").c_str());
  m.def(("sdpa_mask(Tensor query, Tensor key, Tensor? alibi_slopes=None" + option_schema<kSdpaMask>({}, Defaults::yes) +
         ") -> (Tensor attends, Tensor bias)")
            .c_str(),
        {at::Tag::pt2_compliant_tag});
  m.def(
      "dropout_mask(Tensor seed, SymInt batch, SymInt heads, SymInt query_length, SymInt key_length, "
      "float dropout_p) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  // sdpa where all else has its default. Its many arguments take Python's dispatcher longer than a small call computes.
  m.def("sdpa_output(Tensor query, Tensor key, Tensor value, bool is_causal=False) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}

namespace scaledot {
namespace {

Tensor sdpa_output(const Tensor& query, const Tensor& key, const Tensor& value, bool is_causal) {
  AttentionOptions options;
  options.is_causal = is_causal;
  return std::get<0>(call<SdpaOp>({{query, key, value},
                                   std::move(options),
                                   /*return_weights=*/false,
                                   /*average_weights=*/false}));
}

// A composite for every device, for nested tensors (which sdpa refuses) and under torch.vmap.
SCALEDOT_LIBRARY_IMPL(CompositeImplicitAutograd, m) { m.impl("sdpa_output", &sdpa_output); }
SCALEDOT_LIBRARY_IMPL(CompositeImplicitAutogradNestedTensor, m) { m.impl("sdpa_output", &sdpa_output); }
SCALEDOT_LIBRARY_IMPL(FuncTorchBatchedDecomposition, m) { m.impl("sdpa_output", &sdpa_output); }

// The options and the block mask as the ops take them. It refers to the public ones.
struct OpArguments {
  const SdpaOptions& given;
  OptionalTensor blocks, bits;
  AttentionOptions options;

  explicit OpArguments(const SdpaOptions& o) : given(o), options(o) {
    options.masked_score = o.masked_score;
    if (!o.block_mask) return;
    const BlockMask& mask = *o.block_mask;
    blocks = mask.blocks;
    bits = mask.bits;
    options.block_shape = {mask.block_rows, mask.block_keys, mask.query_length, mask.key_length};
  }

  SdpaInputs inputs(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& seed) const {
    return {.query = query,
            .key = key,
            .value = value,
            .attn_mask = given.attn_mask,
            .alibi_slopes = given.alibi_slopes,
            .dropout_seed = seed,
            .relative_bias = given.relative_bias,
            .blocks = blocks,
            .block_bits = bits,
            .key_indices = given.key_indices};
  }
};

}  // namespace

template Tensor3 call<SdpaOp>(const SdpaArgs&);
template Tensor3 redispatch<SdpaOp>(c10::DispatchKeySet, const SdpaArgs&);
template Tensor2 call<SdpaOutOp>(const SdpaOutArgs&);
template Tensor2 redispatch<SdpaOutOp>(c10::DispatchKeySet, const SdpaOutArgs&);
template Tensor4 redispatch<SdpaRecordedOp>(c10::DispatchKeySet, const SdpaRecordedArgs&);
template SdpaGradients call<SdpaBackwardOp>(const SdpaBackwardArgs&);
template SdpaGradients redispatch<SdpaBackwardOp>(c10::DispatchKeySet, const SdpaBackwardArgs&);
template std::string call<ExplainOp>(const ExplainArgs&);
template Tensor2 call<SdpaMaskOp>(const SdpaMaskArgs&);

Tensor call_dropout_mask(const DropoutMaskArgs& a) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(SCALEDOT_OP("dropout_mask"), "").typed<DropoutMaskSignature>();
  return op.call(a.seed, a.batch, a.heads, a.query_length, a.key_length, a.dropout_p);
}

SdpaResult scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                        const SdpaOptions& o) {
  const OptionalTensor seed = dropout_seed(o.dropout_seed, o.dropout_p, o.generator, query);
  const OpArguments given(o);
  auto [output, lse, weights] =
      call<SdpaOp>({given.inputs(query, key, value, seed), given.options, o.return_weights, o.average_weights});
  return {std::move(output), std::move(lse), std::move(weights)};
}

std::string explain(const Tensor& query, const Tensor& key, const Tensor& value, const SdpaOptions& o) {
  const OpArguments given(o);
  return call<ExplainOp>(
      {{given.inputs(query, key, value, o.dropout_seed), given.options, o.return_weights, o.average_weights},
       kNoTensor});
}

}  // namespace scaledot
