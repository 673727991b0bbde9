// Starting a kernel on a stream; without blocks there is nothing to start. Returns nullptr, or what CUDA says is wrong.
#pragma once

#include "cuda/ptx/device.h"

#if defined(__CUDACC__)
#include <cuda_runtime_api.h>
#endif

namespace scaledot {

constexpr int64_t kMaxBlocks = INT32_MAX;  // of a grid's first dimension

#if defined(__CUDACC__)

template <class... Params, class... Args>
static const char* launch(void (*kernel)(Params...), int64_t blocks, int threads, int64_t shared_bytes,
                          DeviceStream stream, const Args&... args) {
  if (blocks == 0) return nullptr;
  // More than 48 KB has to be asked for, once per device; asking again costs nothing, so nobody keeps book.
  cudaError_t status = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                            cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
  if (status == cudaSuccess) {
    kernel<<<dim3(unsigned(blocks)), dim3(unsigned(threads)), size_t(shared_bytes), stream>>>(args...);
    status = cudaGetLastError();
  }
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

#else

template <class... Params, class... Args>
static const char* launch(void (*kernel)(Params...), int64_t blocks, int threads, int64_t shared_bytes, DeviceStream,
                          const Args&... args) {
  if (blocks > 0) sim::run_grid(blocks, threads, shared_bytes, [&] { kernel(args...); });
  return nullptr;
}

#endif

}  // namespace scaledot
