// Attention as a formula of ordinary ATen operations, with the scores written out in memory. It is differentiable to any
// order and in forward mode, which the kernels are not; ops/sdpa_autograd.cpp uses it for just that.
#pragma once

#include "ops/schema.h"

namespace scaledot {

// The same results as scaledot::sdpa, of the same dtypes. Sums are in float32 (float64 for float64).
Tensor3 formula(const SdpaArgs& args);

}  // namespace scaledot
