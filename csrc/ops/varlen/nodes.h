// The graph nodes of scaledot::varlen and scaledot::varlen_backward.
#pragma once

#include "ops/varlen/op.h"

namespace scaledot {

// Give the results of a call the node that their gradients go through.
void record_varlen(Tensor3& results, const VarlenRecordedArgs& args);
void record_varlen_backward(VarlenGradients& results, const VarlenBackwardArgs& args);

}  // namespace scaledot
