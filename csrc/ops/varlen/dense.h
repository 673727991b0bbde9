// The ops on packed sequences, once for all devices.
#pragma once

#include "ops/common/backend.h"
#include "ops/varlen/op.h"

namespace scaledot {

// Whether a call that is recorded for a backward keeps the low part of its output (core/saved.h).
bool saves_output_low(const Backend& backend, const VarlenArgs& args);
Tensor3 varlen_dense(const Backend& backend, const VarlenArgs& args);
Tensor4 varlen_backward_dense(const Backend& backend, const VarlenBackwardArgs& args);
// Meta tensors have no lengths: every sequence counts as one of max_q rows and max_k keys.
std::string explain_varlen_dense(const Backend& backend, const VarlenArgs& args);

}  // namespace scaledot
