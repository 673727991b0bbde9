// How a GPU kernel is run: which one, on which stream, and in which workspace.
#pragma once

#include <c10/core/DeviceGuard.h>

#include "cuda/kernel.h"

namespace scaledot {

// The kernel that takes the problem on the current device; throws if there is none.
const DeviceKernel& choose_cuda(const Problem& problem, Pass pass);

// Selects a kernel and queues it on torch's current stream. Not for a problem without rows or keys.
void run_cuda(const Problem& problem, Pass pass, c10::Device device);

// Makes a device current while it lives, for torch and for the CUDA runtime that this library links.
class CurrentDevice {
 public:
  explicit CurrentDevice(c10::Device device);
  DeviceStream stream() const;  // torch's current one

 private:
  c10::DeviceGuard guard_;
};

// Throws if a launcher returned an error.
void check_launch(const char* error);

}  // namespace scaledot
