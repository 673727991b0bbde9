// The GPU kernels as a library that need not be there: libscaledot_cuda.so. It includes no torch, and the ops include
// nothing of CUDA: they meet here.
#pragma once

#include "cuda/kernel.h"

namespace scaledot {

// Functions that return a message return nullptr on success.
struct CudaLibrary {
  const char* version;  // scaledot's; has to be that of the ops, since both sides know the layout of Problem
  const char* toolkit;  // the version of CUDA that compiled the kernels
  const char* archs;    // "sm_80;sm_90a"
  DeviceKernelTable (*kernels)();
  const DeviceKernel* (*select)(const Problem&, Pass);  // the first kernel that takes the problem, or nullptr
  const char* (*set_device)(int index);                 // makes a device current for this library's CUDA runtime
  // 0, or the compute capability of the current device if CUDA's driver has to compile the kernels for it.
  int (*needs_compiler)();
  // cuda/masks.h
  const char* (*write_attends)(const Problem&, bool* attends, DeviceStream stream);
  const char* (*write_bias)(const Problem&, void* bias, DType dtype, DeviceStream stream);
  const char* (*write_dropout_mask)(const Problem&, bool* keep_mask, DeviceStream stream);
};

// The loaded library; nullptr if there is none.
const CudaLibrary* cuda_library();

// libscaledot_cuda.so calls it when it is loaded.
void register_cuda_library(const CudaLibrary* library);

}  // namespace scaledot
