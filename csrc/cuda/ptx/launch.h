// Launching kernels on a stream, and properties of the current device.
#pragma once

#include "cuda/ptx/device.h"

#if defined(__CUDACC__)
#include <cuda_runtime_api.h>
#endif

namespace scaledot {

constexpr int64_t kMaxBlocks = INT32_MAX;  // of a grid's first dimension

// Properties of the current device.
struct DeviceTraits {
  int capability;  // compute capability: 90 for 9.0; 0 if there is no device
  int multiprocessors;
};

#if defined(__CUDACC__)

// Whether the library has code for this kernel that the current device can run.
template <class... Params>
static bool has_code(void (*kernel)(Params...)) {
  cudaFuncAttributes attributes;
  const bool has = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)) == cudaSuccess;
  if (!has) cudaGetLastError();
  return has;
}

// Launches nothing if `blocks` is 0. `cluster`: the blocks of a cluster (cluster.h). If it is more than 1, each
// argument has exactly the type of the kernel's parameter. Returns nullptr, or CUDA's error message.
template <class... Params, class... Args>
static const char* launch_clusters(void (*kernel)(Params...), int64_t blocks, int cluster, int threads,
                                   int64_t shared_bytes, DeviceStream stream, const Args&... args) {
  if (blocks == 0) return nullptr;
  const void* const code = reinterpret_cast<const void*>(kernel);
  // More than 48 KB must be requested once per device. Requesting it again is cheap, so it is not cached.
  cudaError_t status = cudaFuncSetAttribute(code, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
  if (status == cudaSuccess && cluster == 1) {
    kernel<<<dim3(unsigned(blocks)), dim3(unsigned(threads)), size_t(shared_bytes), stream>>>(args...);
    status = cudaGetLastError();
  } else if (status == cudaSuccess) {
    cudaLaunchAttribute size = {};
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim = {unsigned(cluster), 1, 1};
    const cudaLaunchConfig_t config = {
        dim3(unsigned(blocks)), dim3(unsigned(threads)), size_t(shared_bytes), stream, &size, 1};
    void* pointers[] = {const_cast<void*>(static_cast<const void*>(&args))...};
    status = cudaLaunchKernelExC(&config, code, pointers);
  }
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

// Sets bytes to 0, on the stream. Returns nullptr, or CUDA's error message.
static inline const char* clear_bytes(void* data, int64_t bytes, DeviceStream stream) {
  const cudaError_t status = cudaMemsetAsync(data, 0, size_t(bytes), stream);
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

static inline DeviceTraits device_traits() {
  int device = 0, major = 0, minor = 0, count = 0;
  const bool found = cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;
  if (!found) cudaGetLastError();  // clear the error, or the next call would report it
  return found ? DeviceTraits{10 * major + minor, count} : DeviceTraits{0, 0};
}

#else

template <class... Params>
static bool has_code(void (*)(Params...)) {
  return sim::has_code();
}
static inline const char* clear_bytes(void* data, int64_t bytes, DeviceStream) { return sim::clear_bytes(data, bytes); }
static inline DeviceTraits device_traits() { return {sim::compute_capability(), sim::kMultiprocessors}; }

template <class... Params, class... Args>
static const char* launch_clusters(void (*kernel)(Params...), int64_t blocks, int cluster, int threads,
                                   int64_t shared_bytes, DeviceStream, const Args&... args) {
  if (blocks > 0) sim::run_clusters(blocks, cluster, threads, shared_bytes, [&] { kernel(args...); });
  return nullptr;
}

#endif

template <class... Params, class... Args>
static const char* launch(void (*kernel)(Params...), int64_t blocks, int threads, int64_t shared_bytes,
                          DeviceStream stream, const Args&... args) {
  return launch_clusters(kernel, blocks, 1, threads, shared_bytes, stream, args...);
}

}  // namespace scaledot
