// Starting a kernel on a stream, and what is known of the device it would run on.
#pragma once

#include "cuda/ptx/device.h"

#if defined(__CUDACC__)
#include <cuda_runtime_api.h>
#endif

namespace scaledot {

constexpr int64_t kMaxBlocks = INT32_MAX;  // of a grid's first dimension

#if defined(__CUDACC__)

// Ten times the current device's compute capability: 90 for 9.0. 0 if CUDA does not say.
static inline int compute_capability() {
  int device = 0, major = 0, minor = 0;
  const bool known = cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
  if (!known) cudaGetLastError();  // or the next launch would report it
  return known ? 10 * major + minor : 0;
}

// Whether the library has code of this kernel that the current device runs.
template <class... Params>
static bool has_code(void (*kernel)(Params...)) {
  cudaFuncAttributes attributes;
  const bool has = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)) == cudaSuccess;
  if (!has) cudaGetLastError();
  return has;
}

// Without blocks there is nothing to start. Returns nullptr, or what CUDA says is wrong.
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

static inline int compute_capability() { return sim::compute_capability(); }
template <class... Params>
static bool has_code(void (*)(Params...)) {
  return sim::has_code();
}

template <class... Params, class... Args>
static const char* launch(void (*kernel)(Params...), int64_t blocks, int threads, int64_t shared_bytes, DeviceStream,
                          const Args&... args) {
  if (blocks > 0) sim::run_grid(blocks, threads, shared_bytes, [&] { kernel(args...); });
  return nullptr;
}

#endif

}  // namespace scaledot
