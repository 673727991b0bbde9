// The generic kernels, one file a storage type.
#pragma once

#include "cuda/kernel.h"

namespace scaledot {

struct GenericKernels {
  int64_t (*workspace)(const Problem&, Pass);
  int64_t (*blocks)(const Problem&, Pass);  // of the largest grid
  const char* (*forward)(const Problem&, const DeviceExecutor&);
  const char* (*backward)(const Problem&, const DeviceExecutor&);
};

extern const GenericKernels kGenericFloat32, kGenericFloat64, kGenericBFloat16, kGenericFloat16;

}  // namespace scaledot
