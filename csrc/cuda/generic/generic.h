// The generic kernels, one file a storage type.
#pragma once

#include "core/softmax.h"
#include "cuda/kernel.h"

namespace scaledot {

struct GenericKernels {
  int64_t (*workspace)(const Problem&, Pass);
  int64_t (*blocks)(const Problem&, Pass);  // of the largest grid
  const char* (*forward)(const Problem&, const DeviceExecutor&);
  const char* (*backward)(const Problem&, const DeviceExecutor&);
  // The same if *condition, in device memory, is not 0; otherwise nothing.
  const char* (*backward_if)(const Problem&, const DeviceExecutor&, const int* condition);
  // The weights alone, given the state of every row (batch, head, i). Not for float64.
  const char* (*weights)(const Problem&, const RowState<float>* states, DeviceStream);
};

extern const GenericKernels kGenericFloat32, kGenericFloat64, kGenericBFloat16, kGenericFloat16;

}  // namespace scaledot
