// The ops on packed sequences, for meta and fake tensors. The numbers in cu_seq_q and the like are not checked.
#include "ops/common/meta.h"

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "ops/common/checks.h"
#include "ops/common/op_namespace.h"
#include "ops/common/out.h"
#include "ops/varlen/checks.h"

namespace scaledot {
namespace {

Tensor2 varlen_meta(const VarlenArgs& args) {
  const Tensor& query = args.inputs.query;
  const VarlenShapes<c10::SymInt> shapes = check_varlen<c10::SymInt>(args);
  const at::ScalarType type = query.scalar_type();
  return {empty_meta(shapes.output(), query, type), empty_meta(shapes.lse(), query, lse_dtype(type))};
}

Tensor varlen_out_meta(const VarlenOutArgs& args) {
  const Tensor& query = args.inputs.query;
  const VarlenShapes<c10::SymInt> shapes = check_varlen<c10::SymInt>(args.forward());
  check_out<c10::SymInt>(args.out, shapes.output(), query);
  return empty_meta(shapes.lse(), query, lse_dtype(query.scalar_type()));
}

Tensor3 varlen_recorded_meta(const VarlenRecordedArgs& args) {
  const auto [output, lse] = varlen_meta(args);
  check_varlen_recorded(args);
  return {output, lse,
          args.save_output_low ? at::empty_like(output) : empty_meta(c10::SymInt(0), output, output.scalar_type())};
}

VarlenGradients varlen_backward_meta(const VarlenBackwardArgs& args) {
  const VarlenInputs& in = args.inputs;
  check_varlen_backward(args, check_varlen<c10::SymInt>(args.forward()));
  const c10::SymInt none[] = {0};
  const auto gradient = [&](int k, const Tensor& input) {
    return empty_meta(args.output_mask[k] ? input.sym_sizes() : c10::SymIntArrayRef(none), input, input.scalar_type());
  };
  return {
      gradient(0, in.query), gradient(1, in.key), gradient(2, in.value),
      args.output_mask[3] ? gradient(3, *in.relative_bias)
                          : empty_meta(none, in.query, lse_dtype(in.query.scalar_type())),
      args.output_mask[4] ? gradient(4, *in.attn_mask) : empty_meta(none, in.query, lse_dtype(in.query.scalar_type()))};
}

}  // namespace

SCALEDOT_LIBRARY_IMPL(Meta, m) {
  m.impl("varlen", registered<VarlenOp, &varlen_meta>());
  m.impl("varlen_out", registered<VarlenOutOp, &varlen_out_meta>());
  m.impl("varlen_recorded", registered<VarlenRecordedOp, &varlen_recorded_meta>());
  m.impl("varlen_backward", registered<VarlenBackwardOp, &varlen_backward_meta>());
}

}  // namespace scaledot
