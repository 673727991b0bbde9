// The generic kernels as the kernel table calls them, one instance a storage type.
#pragma once

#include "core/softmax.h"
#include "cuda/kernel.h"

namespace scaledot {

// delta and lse of every row, which the first kernel of a backward stores.
template <class T>
struct PreparedRows {
  T* delta;
  SplitLse<T>* lse;
};

// Functions that launch kernels return nullptr, or CUDA's error message.
struct GenericKernels {
  int64_t (*workspace)(const Problem&, Pass);  // bytes
  int64_t (*blocks)(const Problem&, Pass);     // an upper bound on the blocks of any grid
  const char* (*forward)(const Problem&, const DeviceExecutor&);
  const char* (*backward)(const Problem&, const DeviceExecutor&);
  // A part of the forward for sm_90, too: weights from the softmax state of every row (batch, head, i). Not for
  // float64.
  const char* (*weights)(const Problem&, RowState<float>* states, DeviceStream);
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
