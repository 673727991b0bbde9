// How a GPU kernel is run: which one, on which stream, and in which workspace.
#pragma once

#include <c10/core/DeviceGuard.h>

#include "cuda/library.h"

namespace scaledot {

// The GPU kernels; throws if libscaledot_cuda.so is not loaded.
const CudaLibrary& cuda_library_for(c10::Device device);

// The kernel that takes the problem on the current device; throws if there is none.
const DeviceKernel& choose_cuda(const CudaLibrary& library, const Problem& problem, Pass pass);

// Selects a kernel and queues it on torch's current stream. Not for a problem without rows or keys.
void run_cuda(const Problem& problem, Pass pass, c10::Device device);

// Makes a device current while it lives, for torch and for the CUDA runtime that the GPU kernels link.
class CurrentDevice {
 public:
  CurrentDevice(const CudaLibrary& library, c10::Device device);
  DeviceStream stream() const;  // torch's current one

 private:
  c10::DeviceGuard guard_;
};

// Throws if a launcher returned an error.
void check_launch(const char* error);

}  // namespace scaledot
