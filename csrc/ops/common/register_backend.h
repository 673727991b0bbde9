// Registers every op for the tensors of a backend.
#pragma once

#include <torch/library.h>

#include "ops/sdpa/dense.h"
#include "ops/varlen/dense.h"

namespace scaledot {

// The backend, if its kernels are there.
template <const Backend& backend>
const Backend& backend_for(const Tensor& tensor, const char* name = "query") {
  if (backend.require_kernels) backend.require_kernels(tensor, name);
  return backend;
}

template <const Backend& backend>
void register_explanations(torch::Library& m) {
  m.impl("explain", registered<ExplainOp, [](const SdpaArgs& a) {
           return explain_dense(backend_for<backend>(a.inputs.query), a);
         }>());
  m.impl("explain_varlen", registered<ExplainVarlenOp, [](const VarlenArgs& a) {
           return explain_varlen_dense(backend_for<backend>(a.inputs.query), a);
         }>());
}

template <const Backend& backend>
void register_backend(torch::Library& m) {
  m.impl("sdpa",
         registered<SdpaOp, [](const SdpaArgs& a) { return sdpa_dense(backend_for<backend>(a.inputs.query), a); }>());
  m.impl("sdpa_backward", registered<SdpaBackwardOp, [](const SdpaBackwardArgs& a) {
           return sdpa_backward_dense(backend_for<backend>(a.inputs.query), a);
         }>());
  m.impl("sdpa_mask", registered<SdpaMaskOp, [](const SdpaMaskArgs& a) {
           return sdpa_mask_dense(backend_for<backend>(a.query), a);
         }>());
  m.impl("dropout_mask", [](const Tensor& seed, c10::SymInt batch, c10::SymInt heads, c10::SymInt query_length,
                            c10::SymInt key_length, double dropout_p) {
    return dropout_mask_dense(backend_for<backend>(seed, "seed"),
                              {seed, batch, heads, query_length, key_length, dropout_p});
  });
  m.impl("varlen", registered<VarlenOp, [](const VarlenArgs& a) {
           return varlen_dense(backend_for<backend>(a.inputs.query), a);
         }>());
  m.impl("varlen_backward", registered<VarlenBackwardOp, [](const VarlenBackwardArgs& a) {
           return varlen_backward_dense(backend_for<backend>(a.inputs.query), a);
         }>());
  register_explanations<backend>(m);
}

}  // namespace scaledot
