// For the ops on meta and fake tensors: the same checks and the same shapes as on a device, no data. Sizes may be
// symbolic.
#pragma once

#include <ATen/ops/empty.h>

#include "ops/common/op.h"

namespace scaledot {

inline Tensor empty_meta(c10::SymIntArrayRef sizes, const Tensor& like, at::ScalarType type) {
  return at::empty_symint(sizes, like.options().dtype(type));
}

}  // namespace scaledot
