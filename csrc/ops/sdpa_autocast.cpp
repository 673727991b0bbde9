// Under torch.autocast query, key and value are cast to its dtype. attn_mask and alibi_slopes are left as they are: any
// floating dtype is taken for them, and casting a mask could turn a large finite number into inf.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "ops/schema.h"

namespace scaledot {
namespace {

template <c10::DeviceType device, c10::DispatchKey autocast, auto op, class Result>
Result with_cast(const SdpaArgs& args) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast);
  const at::ScalarType type = at::autocast::get_autocast_dtype(device);
  const SdpaInputs& in = args.inputs;
  const Tensor query = at::autocast::cached_cast(type, in.query, device);
  const Tensor key = at::autocast::cached_cast(type, in.key, device);
  const Tensor value = at::autocast::cached_cast(type, in.value, device);
  return op({{query, key, value, in.attn_mask, in.alibi_slopes, in.dropout_seed},
             args.options,
             args.return_weights,
             args.average_weights});
}

Tensor3 sdpa(const SdpaArgs& args) { return call_sdpa(args); }

template <c10::DeviceType device, c10::DispatchKey autocast>
void register_casts(torch::Library& m) {
  m.impl("sdpa", sdpa_kernel<&with_cast<device, autocast, &sdpa, Tensor3>>);
  m.impl("explain", explain_kernel<&with_cast<device, autocast, &call_explain, std::string>>);
}

}  // namespace

TORCH_LIBRARY_IMPL(scaledot, AutocastCPU, m) { register_casts<c10::DeviceType::CPU, c10::DispatchKey::AutocastCPU>(m); }
TORCH_LIBRARY_IMPL(scaledot, AutocastCUDA, m) { register_casts<c10::DeviceType::CUDA, c10::DispatchKey::Autocast>(m); }

}  // namespace scaledot
