// The results of packed sequences from one scaledot::sdpa (or sdpa_backward) a sequence: differentiable to any order
// and in forward mode, which the kernels are not. Waits for the device, to know the lengths.
#pragma once

#include "ops/varlen/op.h"

namespace scaledot {

Tensor2 varlen_by_sequence(const VarlenArgs& args);
VarlenGradients varlen_backward_by_sequence(const VarlenBackwardArgs& args);

}  // namespace scaledot
