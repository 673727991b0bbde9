// Attention as a formula of ATen operations, with the scores in memory. Unlike the kernels it is differentiable to any
// order and in forward mode; ops/sdpa/autograd.cpp uses it for that.
#pragma once

#include "ops/sdpa/op.h"

namespace scaledot {

// Returns the results of scaledot::sdpa, in the same dtypes. Sums are in float32 (float64 for float64).
Tensor3 formula(const SdpaArgs& args);

}  // namespace scaledot
