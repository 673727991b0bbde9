// The ops on packed sequences, once for all devices.
#pragma once

#include "ops/common/backend.h"
#include "ops/varlen/op.h"

namespace scaledot {

// Whether a call that is recorded for a backward saves the low part of its output (core/saved.h).
bool saves_output_low(const Backend& backend, const VarlenArgs& args);
Tensor2 run_varlen(const Backend& backend, const VarlenArgs& args);
Tensor run_varlen_out(const Backend& backend, const VarlenOutArgs& args);
Tensor3 run_varlen_recorded(const Backend& backend, const VarlenRecordedArgs& args);
VarlenGradients run_varlen_backward(const Backend& backend, const VarlenBackwardArgs& args);
// Meta tensors have no lengths: every sequence counts as one of max_q rows and max_k keys.
std::string run_explain_varlen(const Backend& backend, const ExplainVarlenArgs& args);

}  // namespace scaledot
