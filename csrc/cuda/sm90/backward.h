// The backward for sm_90, one file a storage type.
#pragma once

#include "cuda/kernel.h"

namespace scaledot {

// The rest of the reasons is the kernel table's.
struct Sm90Backward {
  const char* (*why_not)(const Problem&);
  int64_t (*workspace)(const Problem&);
  const char* (*run)(const Problem&, const DeviceExecutor&);
};

extern const Sm90Backward kSm90BackwardBFloat16, kSm90BackwardFloat16;

}  // namespace scaledot
