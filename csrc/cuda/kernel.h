// DeviceKernel: one row of the table of GPU kernels, as core/kernel.h for the CPU.
#pragma once

#include "core/kernel.h"
#include "cuda/stream.h"

namespace scaledot {

// Where a kernel runs. Everything is queued on the stream; nothing waits for the device.
struct DeviceExecutor {
  DeviceStream stream;
  void* workspace;  // device memory: at least DeviceKernel::workspace(problem, pass) bytes, aligned to kAlignment
};

// The kernels' status in explain() and build_info(), until they have passed all steps of tests/gpu/run on a GPU.
constexpr const char* kCudaStatus = "tests passed on an NVIDIA H200; not yet checked there for races";

struct DeviceKernel {
  const char* name;
  // nullptr if the kernel can run this problem on the current device, otherwise the reason in one clause.
  const char* (*why_not)(const Problem&, Pass);
  int64_t (*workspace)(const Problem&, Pass);  // bytes
  // nullptr, or CUDA's error message.
  const char* (*forward)(const Problem&, const DeviceExecutor&);
  const char* (*backward)(const Problem&, const DeviceExecutor&);  // nullptr if why_not refuses every backward
};

struct DeviceKernelTable {
  const DeviceKernel* kernels;  // fastest first
  int count;
};

DeviceKernelTable cuda_kernels();  // csrc/cuda/kernels.cu

// The current device's compute capability: 90 for 9.0, 0 if there is none.
int device_capability();

// The first kernel of the table that can run the problem on the current device; nullptr if none can.
const DeviceKernel* select_cuda(const Problem& problem, Pass pass);

}  // namespace scaledot
