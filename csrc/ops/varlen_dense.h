// scaledot::varlen and its backward for dense tensors, once for all devices.
#pragma once

#include "ops/sdpa_dense.h"
#include "ops/varlen_schema.h"

namespace scaledot {

Tensor2 varlen_dense(const Backend& backend, const VarlenArgs& args);
Tensor3 varlen_backward_dense(const Backend& backend, const VarlenBackwardArgs& args);

}  // namespace scaledot
