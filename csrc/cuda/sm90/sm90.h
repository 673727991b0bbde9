// The kernels for Hopper (compute capability 9.0), one file a storage type.
#pragma once

#include "cuda/kernel.h"

namespace scaledot {

struct Sm90Kernels {
  int64_t (*workspace)(const Problem&);
  const char* (*forward)(const Problem&, const DeviceExecutor&);
};

extern const Sm90Kernels kSm90BFloat16, kSm90Float16;

// nullptr if the kernels can run this forward pass on the current device, otherwise the reason.
const char* sm90_why_not(const Problem& p, Pass pass);

}  // namespace scaledot
