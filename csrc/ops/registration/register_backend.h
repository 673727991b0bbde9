// Registers every op for the tensors of a backend.
#pragma once

#include <torch/library.h>

#include "ops/common/environment.h"
#include "ops/sdpa/kernel_call.h"
#include "ops/varlen/kernel_call.h"

namespace scaledot {

// The backend, if its kernels are there.
template <const Backend& backend>
const Backend& backend_for(const Tensor& tensor, const char* name = "query") {
  warn_of_environment();
  if (backend.require_kernels) backend.require_kernels(tensor, name);
  return backend;
}

// Registers `run` as the kernel of an op.
template <const Backend& backend, class Op, auto run>
void implement(torch::Library& m) {
  m.impl(Op::kName, registered<Op, [](const typename Op::Args& a) {
           if constexpr (requires { a.inputs; }) {
             return run(backend_for<backend>(a.inputs.query), a);
           } else {
             return run(backend_for<backend>(a.query), a);
           }
         }>());
}

template <const Backend& backend>
void register_explanations(torch::Library& m) {
  implement<backend, ExplainOp, &run_explain>(m);
  implement<backend, ExplainVarlenOp, &run_explain_varlen>(m);
}

template <const Backend& backend>
void register_backend(torch::Library& m) {
  implement<backend, SdpaOp, &run_sdpa>(m);
  implement<backend, SdpaOutOp, &run_sdpa_out>(m);
  implement<backend, SdpaRecordedOp, &run_sdpa_recorded>(m);
  implement<backend, SdpaBackwardOp, &run_sdpa_backward>(m);
  implement<backend, SdpaMaskOp, &run_sdpa_mask>(m);
  implement<backend, VarlenOp, &run_varlen>(m);
  implement<backend, VarlenOutOp, &run_varlen_out>(m);
  implement<backend, VarlenRecordedOp, &run_varlen_recorded>(m);
  implement<backend, VarlenBackwardOp, &run_varlen_backward>(m);
  m.impl("dropout_mask", [](const Tensor& seed, c10::SymInt batch, c10::SymInt heads, c10::SymInt query_length,
                            c10::SymInt key_length, double dropout_p) {
    return run_dropout_mask(backend_for<backend>(seed, "seed"),
                            {seed, batch, heads, query_length, key_length, dropout_p});
  });
  register_explanations<backend>(m);
}

}  // namespace scaledot
