// Under torch.autocast query, key and value are cast to its dtype, as scaledot::sdpa's are (ops/sdpa_autocast.cpp).
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "ops/varlen_schema.h"

namespace scaledot {
namespace {

template <c10::DeviceType device, c10::DispatchKey autocast, auto op, class Result>
Result with_cast(const VarlenArgs& args) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast);
  const at::ScalarType type = at::autocast::get_autocast_dtype(device);
  const VarlenInputs& in = args.inputs;
  const Tensor query = at::autocast::cached_cast(type, in.query, device);
  const Tensor key = at::autocast::cached_cast(type, in.key, device);
  const Tensor value = at::autocast::cached_cast(type, in.value, device);
  return op(
      {{query, key, value, in.cu_seq_q, in.cu_seq_k, in.seqused_k, in.block_table, in.alibi_slopes, in.dropout_seed},
       args.options});
}

Tensor2 varlen(const VarlenArgs& args) { return call_varlen(args); }

template <c10::DeviceType device, c10::DispatchKey autocast>
void register_casts(torch::Library& m) {
  m.impl("varlen", varlen_kernel<&with_cast<device, autocast, &varlen, Tensor2>>);
  m.impl("explain_varlen", explain_varlen_kernel<&with_cast<device, autocast, &call_explain_varlen, std::string>>);
}

}  // namespace

TORCH_LIBRARY_IMPL(scaledot, AutocastCPU, m) { register_casts<c10::DeviceType::CPU, c10::DispatchKey::AutocastCPU>(m); }
TORCH_LIBRARY_IMPL(scaledot, AutocastCUDA, m) { register_casts<c10::DeviceType::CUDA, c10::DispatchKey::Autocast>(m); }

}  // namespace scaledot
