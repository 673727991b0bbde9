// The generic kernels as the kernel table calls them, one instance a storage type.
#pragma once

#include "core/softmax.h"
#include "cuda/kernel.h"

namespace scaledot {

// Functions that launch kernels return nullptr, or CUDA's error message.
struct GenericKernels {
  int64_t (*workspace)(const Problem&, Pass);  // bytes
  int64_t (*blocks)(const Problem&, Pass);     // an upper bound on the blocks of any grid
  const char* (*forward)(const Problem&, const DeviceExecutor&);
  const char* (*backward)(const Problem&, const DeviceExecutor&);
  // Parts of a pass that the kernels for sm_90 share. Not for float64. Every row is (batch, head, i).
  const char* (*weights)(const Problem&, RowState<float>* states, DeviceStream);  // from the softmax state of every row
  const char* (*prepare)(const Problem&, float* delta, SplitLse<float>* lse, DeviceStream);  // stores both of every row
};

// The forward over quantised keys and values. Workspace and blocks are those of the queries' GenericKernels.
using QuantisedForward = const char* (*)(const Problem&, const DeviceExecutor&);

extern const QuantisedForward kQuantisedFloat32, kQuantisedBFloat16, kQuantisedFloat16;
extern const GenericKernels kGenericFloat32, kGenericFloat64, kGenericBFloat16, kGenericFloat16;

inline const GenericKernels& generic_kernels(DType dtype) {
  switch (dtype) {
    case DType::float64: return kGenericFloat64;
    case DType::bfloat16: return kGenericBFloat16;
    case DType::float16: return kGenericFloat16;
    default: return kGenericFloat32;
  }
}

}  // namespace scaledot
