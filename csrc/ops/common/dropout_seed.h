// The dropout seed of a call from C++.
#pragma once

#include <ATen/core/Generator.h>

#include "ops/common/op.h"

namespace scaledot {

// `given`, or for a call with dropout and without a seed one drawn from `generator` (default: torch's, of the CPU or
// query's GPU). The Python functions draw alike: the same state of the generator gives the same seed.
OptionalTensor dropout_seed(const OptionalTensor& given, double dropout_p,
                            const std::optional<at::Generator>& generator, const Tensor& query);

}  // namespace scaledot
