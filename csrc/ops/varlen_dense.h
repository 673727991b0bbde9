// scaledot::varlen and its backward for dense tensors, once for all devices.
#pragma once

#include <sstream>

#include "ops/sdpa_dense.h"
#include "ops/varlen_schema.h"

namespace scaledot {

Tensor2 varlen_dense(const Backend& backend, const VarlenArgs& args);
Tensor3 varlen_backward_dense(const Backend& backend, const VarlenBackwardArgs& args);

// The JSON of scaledot::explain_varlen. `write_pass` writes one pass of the packed problem, whose tensors but for the lengths have no
// data; meta tensors' lengths are the bounds max_q and max_k.
std::string explain_varlen_dense(const Backend& backend, const VarlenArgs& args,
                                 void (*write_pass)(std::ostringstream& json, const Problem& packed, Pass pass),
                                 const char* device, const char* capability);

}  // namespace scaledot
