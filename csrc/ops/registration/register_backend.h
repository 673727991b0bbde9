// Registers every op for the tensors of a backend.
#pragma once

#include <torch/library.h>

#include "ops/sdpa/kernel_call.h"
#include "ops/varlen/kernel_call.h"

namespace scaledot {

// The backend, if its kernels are there.
template <const Backend& backend>
const Backend& backend_for(const Tensor& tensor, const char* name = "query") {
  if (backend.require_kernels) backend.require_kernels(tensor, name);
  return backend;
}

template <const Backend& backend>
void register_explanations(torch::Library& m) {
  m.impl(
      "explain",
      registered<ExplainOp, [](const SdpaArgs& a) { return run_explain(backend_for<backend>(a.inputs.query), a); }>());
  m.impl("explain_varlen", registered<ExplainVarlenOp, [](const VarlenArgs& a) {
           return run_explain_varlen(backend_for<backend>(a.inputs.query), a);
         }>());
}

template <const Backend& backend>
void register_backend(torch::Library& m) {
  m.impl("sdpa",
         registered<SdpaOp, [](const SdpaArgs& a) { return run_sdpa(backend_for<backend>(a.inputs.query), a); }>());
  m.impl("sdpa_recorded", registered<SdpaRecordedOp, [](const SdpaRecordedArgs& a) {
           return run_sdpa_recorded(backend_for<backend>(a.inputs.query), a);
         }>());
  m.impl("sdpa_backward", registered<SdpaBackwardOp, [](const SdpaBackwardArgs& a) {
           return run_sdpa_backward(backend_for<backend>(a.inputs.query), a);
         }>());
  m.impl(
      "sdpa_mask",
      registered<SdpaMaskOp, [](const SdpaMaskArgs& a) { return run_sdpa_mask(backend_for<backend>(a.query), a); }>());
  m.impl("dropout_mask", [](const Tensor& seed, c10::SymInt batch, c10::SymInt heads, c10::SymInt query_length,
                            c10::SymInt key_length, double dropout_p) {
    return run_dropout_mask(backend_for<backend>(seed, "seed"),
                            {seed, batch, heads, query_length, key_length, dropout_p});
  });
  m.impl(
      "varlen",
      registered<VarlenOp, [](const VarlenArgs& a) { return run_varlen(backend_for<backend>(a.inputs.query), a); }>());
  m.impl("varlen_recorded", registered<VarlenRecordedOp, [](const VarlenRecordedArgs& a) {
           return run_varlen_recorded(backend_for<backend>(a.inputs.query), a);
         }>());
  m.impl("varlen_backward", registered<VarlenBackwardOp, [](const VarlenBackwardArgs& a) {
           return run_varlen_backward(backend_for<backend>(a.inputs.query), a);
         }>());
  register_explanations<backend>(m);
}

}  // namespace scaledot
