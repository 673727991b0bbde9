// The dropout seed of a call from C++.
#pragma once

#include <ATen/core/Generator.h>

#include "ops/schema.h"

namespace scaledot {

// `given`, or where a call that drops weights has none, one drawn from `generator`; by default torch's own, of the CPU or query's GPU.
OptionalTensor draw_seed(const OptionalTensor& given, double dropout_p, const std::optional<at::Generator>& generator,
                         const Tensor& query);

}  // namespace scaledot
