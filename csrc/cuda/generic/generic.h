// The generic kernels as the kernel table calls them, one instance a storage type.
#pragma once

#include "core/softmax.h"
#include "cuda/kernel.h"

namespace scaledot {

// delta and lse of every row, which prepare_kernel stores for the backward.
template <class T>
struct PreparedRows {
  T* delta;
  SplitLse<T>* lse;
  // If another kernel has stored both: whether an lse of its block k is not precise enough, and prepare_kernel has to
  // compute these once more. Otherwise nullptr.
  int* imprecise;
  int64_t imprecise_blocks;
};

// Functions that launch kernels return nullptr, or CUDA's error message.
struct GenericKernels {
  int64_t (*workspace)(const Problem&, Pass);  // bytes
  int64_t (*blocks)(const Problem&, Pass);     // an upper bound on the blocks of any grid
  const char* (*forward)(const Problem&, const DeviceExecutor&);
  const char* (*backward)(const Problem&, const DeviceExecutor&);
  // Parts of a pass that the kernels for sm_90 share. Not for float64. Every row is (batch, head, i).
  const char* (*weights)(const Problem&, RowState<float>* states, DeviceStream);  // from the softmax state of every row
  const char* (*prepare)(const Problem&, const PreparedRows<float>&, DeviceStream);
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
