// The schemas of the ops on packed sequences, and the public C++ calls.
#include "ops/varlen/varlen.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include "ops/common/dropout_seed.h"
#include "ops/common/op_namespace.h"
#include "ops/varlen/op.h"

SCALEDOT_LIBRARY_FRAGMENT(m) {
  using namespace scaledot;
  const std::string inputs = input_schema<VarlenInputs>(Defaults::no);
  const std::string arguments = inputs + ", SymInt max_q, SymInt max_k" +
                                option_schema<kVarlen>(AttentionOptions(VarlenOptions()), Defaults::yes) +
                                ", SymInt? num_splits=None";
  const std::string forward = "(" + arguments;
  const std::string backward = "(Tensor? grad_output, Tensor? grad_lse, " + inputs +
                               ", Tensor output, Tensor lse, Tensor? saved, SymInt max_q, SymInt max_k" +
                               option_schema<kVarlen>({}, Defaults::no) + ", SymInt? num_splits, " +
                               output_mask_schema<VarlenInputs>() + ") -> ";
  m.def(("varlen" + forward + ") -> (Tensor output, Tensor lse)").c_str(),
        {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
  m.def(("varlen_out(Tensor(a!) out, " + arguments + ") -> (Tensor lse)").c_str(),
        {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
  m.def(("varlen_recorded" + forward + ", bool save_output_low=False) -> (Tensor output, Tensor lse, Tensor saved)")
            .c_str(),
        {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
  m.def(("varlen_backward" + backward + gradient_schema<VarlenInputs>()).c_str(),
        {at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order});
  m.def(("explain_varlen" + forward + ", Tensor? out=None) -> str").c_str());
}

namespace scaledot {

template Tensor2 call<VarlenOp>(const VarlenArgs&);
template Tensor2 redispatch<VarlenOp>(c10::DispatchKeySet, const VarlenArgs&);
template Tensor call<VarlenOutOp>(const VarlenOutArgs&);
template Tensor redispatch<VarlenOutOp>(c10::DispatchKeySet, const VarlenOutArgs&);
template Tensor3 redispatch<VarlenRecordedOp>(c10::DispatchKeySet, const VarlenRecordedArgs&);
template VarlenGradients call<VarlenBackwardOp>(const VarlenBackwardArgs&);
template VarlenGradients redispatch<VarlenBackwardOp>(c10::DispatchKeySet, const VarlenBackwardArgs&);
template std::string call<ExplainVarlenOp>(const ExplainVarlenArgs&);

namespace {

VarlenArgs arguments(const VarlenInputs& inputs, c10::SymInt max_q, c10::SymInt max_k, const VarlenOptions& o) {
  return {inputs, std::move(max_q), std::move(max_k), AttentionOptions(o), o.num_splits};
}

}  // namespace

VarlenResult varlen_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seq_q,
                              const OptionalTensor& cu_seq_k, c10::SymInt max_q, c10::SymInt max_k,
                              const VarlenOptions& o) {
  const OptionalTensor seed = dropout_seed(o.dropout_seed, o.dropout_p, o.generator, query);
  auto [output, lse] =
      call<VarlenOp>(arguments({query, key, value, cu_seq_q, cu_seq_k, o.seqused_k, o.block_table, o.alibi_slopes, seed,
                                o.relative_bias, o.k_scale, o.v_scale, o.attn_mask},
                               std::move(max_q), std::move(max_k), o));
  return {std::move(output), std::move(lse)};
}

std::string explain_varlen(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seq_q,
                           const OptionalTensor& cu_seq_k, c10::SymInt max_q, c10::SymInt max_k,
                           const VarlenOptions& o) {
  return call<ExplainVarlenOp>(
      {arguments({query, key, value, cu_seq_q, cu_seq_k, o.seqused_k, o.block_table, o.alibi_slopes, o.dropout_seed,
                  o.relative_bias, o.k_scale, o.v_scale, o.attn_mask},
                 std::move(max_q), std::move(max_k), o),
       kNoTensor});
}

}  // namespace scaledot
