// The graph nodes of scaledot::sdpa and scaledot::sdpa_backward.
#pragma once

#include "ops/sdpa/op.h"
#include "ops/sdpa/saved.h"

namespace scaledot {

// Give the results of a call the node that their gradients go through.
// `third`: the parts of what the forward gave as its third result, which need not be that of the call.
void record_sdpa(Tensor3& result, const SdpaArgs& args, const WeightsAndOutputLow& third);
void record_sdpa_backward(Tensor5& result, const SdpaBackwardArgs& args);

}  // namespace scaledot
