// Under torch.autocast query, key and value are cast to its dtype, unless quantised. Masks, slopes and biases are left
// as they are: any floating dtype is taken for them, and a cast could turn a large finite number of a mask into inf.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "ops/common/checks.h"
#include "ops/common/op_namespace.h"
#include "ops/sdpa/op.h"
#include "ops/varlen/op.h"

namespace scaledot {
namespace {

template <class Op, c10::DeviceType device, c10::DispatchKey autocast>
typename Op::Result with_cast(const typename Op::Args& args) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast);
  const at::ScalarType type = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const Tensor& tensor) {
    return is_quantised(tensor) ? tensor : at::autocast::cached_cast(type, tensor, device);
  };
  const Tensor query = at::autocast::cached_cast(type, args.inputs.query, device);
  const Tensor key = cast(args.inputs.key), value = cast(args.inputs.value);
  return call<Op>(args.with(with_qkv(args.inputs, query, key, value)));
}

template <c10::DeviceType device, c10::DispatchKey autocast>
void register_casts(torch::Library& m) {
  m.impl("sdpa", registered<SdpaOp, &with_cast<SdpaOp, device, autocast>>());
  m.impl("sdpa_out", registered<SdpaOutOp, &with_cast<SdpaOutOp, device, autocast>>());
  m.impl("explain", registered<ExplainOp, &with_cast<ExplainOp, device, autocast>>());
  m.impl("varlen", registered<VarlenOp, &with_cast<VarlenOp, device, autocast>>());
  m.impl("varlen_out", registered<VarlenOutOp, &with_cast<VarlenOutOp, device, autocast>>());
  m.impl("explain_varlen", registered<ExplainVarlenOp, &with_cast<ExplainVarlenOp, device, autocast>>());
}

}  // namespace

SCALEDOT_LIBRARY_IMPL(AutocastCPU, m) { register_casts<c10::DeviceType::CPU, c10::DispatchKey::AutocastCPU>(m); }
SCALEDOT_LIBRARY_IMPL(AutocastCUDA, m) { register_casts<c10::DeviceType::CUDA, c10::DispatchKey::Autocast>(m); }

}  // namespace scaledot
