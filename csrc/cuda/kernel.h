// DeviceKernel: one row of the table of GPU kernels; what core/kernel.h is for the CPU.
#pragma once

#include "core/kernel.h"
#include "cuda/stream.h"

namespace scaledot {

// Where a kernel runs. Everything is queued on the stream, nothing waits for the device.
struct DeviceExecutor {
  DeviceStream stream;
  void* workspace;  // device memory: at least DeviceKernel::workspace(problem, pass) bytes, aligned to kAlignment
};

// What explain() and build_info() say of the kernels until they have passed the tests on a GPU.
constexpr const char* kCudaStatus = "not yet verified on hardware";

struct DeviceKernel {
  const char* name;
  // nullptr if the kernel can run this problem on the current device, otherwise the reason in one clause.
  const char* (*why_not)(const Problem&, Pass);
  int64_t (*workspace)(const Problem&, Pass);  // bytes
  // nullptr, or what CUDA says is wrong.
  const char* (*forward)(const Problem&, const DeviceExecutor&);
  const char* (*backward)(const Problem&, const DeviceExecutor&);  // nullptr if why_not refuses every backward
};

struct DeviceKernelTable {
  const DeviceKernel* kernels;  // fastest first
  int count;
};

DeviceKernelTable cuda_kernels();  // csrc/cuda/kernels.cu

// The first kernel of the table that takes the problem on the current device; nullptr if none does.
const DeviceKernel* select_cuda(const Problem& problem, Pass pass);

}  // namespace scaledot
