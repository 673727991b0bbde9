// The kernels for Hopper (compute capability 9.0) as the kernel table calls them, one instance a pass and storage type.
#pragma once

#include "cuda/kernel.h"

namespace scaledot {

// Whether the library has them: their instructions can only be compiled for sm_90a.
#if defined(SCALEDOT_SM90A)
constexpr bool kHasSm90 = true;
#else
constexpr bool kHasSm90 = false;
#endif

struct Sm90Kernels {
  int64_t (*workspace)(const Problem&);
  const char* (*run)(const Problem&, const DeviceExecutor&);
};

extern const Sm90Kernels kSm90ForwardBFloat16, kSm90ForwardFloat16;
extern const Sm90Kernels kSm90BackwardBFloat16, kSm90BackwardFloat16;

// nullptr, or the reason why the kernels cannot run this problem. The caller has checked the GPU and the dtype.
const char* sm90_why_not(const Problem& p, Pass pass);

}  // namespace scaledot
