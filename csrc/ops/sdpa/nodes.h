// The graph nodes of scaledot::sdpa and scaledot::sdpa_backward.
#pragma once

#include "ops/sdpa/op.h"

namespace scaledot {

// Give the results of a call the node that their gradients go through.
void record_sdpa(Tensor4& results, const SdpaRecordedArgs& args);
void record_sdpa_backward(SdpaGradients& results, const SdpaBackwardArgs& args);

}  // namespace scaledot
