// Launching kernels on a stream, and properties of the current device.
#pragma once

#include <atomic>
#include <type_traits>

#include "cuda/ptx/device.h"

#if defined(__CUDACC__)
#include <cuda_runtime_api.h>
#endif

namespace scaledot {

constexpr int64_t kMaxBlocks = INT32_MAX;           // of a grid's first dimension
constexpr int64_t kUnaskedSharedBytes = 48 * 1024;  // of a block; more has to be requested

// Properties of the current device.
struct DeviceTraits {
  int capability;  // compute capability: 90 for 9.0; 0 if there is no device
  int multiprocessors;
};

// The shared memory that each kernel was last given on each device, in KiB. Forgets what shares a place with another
// kernel; a caller then asks once more.
class GivenMemory {
 public:
  bool has(const void* kernel, int device, int64_t kib) const {
    return place(kernel, device).load(std::memory_order_relaxed) == entry(kernel, device, kib);
  }
  void set(const void* kernel, int device, int64_t kib) {
    if (device < kDevices) place(kernel, device).store(entry(kernel, device, kib), std::memory_order_relaxed);
  }

 private:
  static constexpr int kPlaces = 256, kDevices = 256;
  // One number, so that it is whole in every thread: the 48 bits that an address has, 8 of the device, 8 of the KiB.
  static uint64_t entry(const void* kernel, int device, int64_t kib) {
    return uint64_t(reinterpret_cast<uintptr_t>(kernel)) << 16 | uint64_t(device) << 8 | uint64_t(kib);
  }
  std::atomic<uint64_t>& place(const void* kernel, int device) const {
    return entries_[(uint64_t(reinterpret_cast<uintptr_t>(kernel)) / 16 + uint64_t(device) * 37) % kPlaces];
  }
  mutable std::atomic<uint64_t> entries_[kPlaces] = {};
};

#if defined(__CUDACC__)

// nullptr, or CUDA's error message. The runtime keeps an error until it is asked for it: torch's next launch would ask,
// and fail.
static inline const char* message_of(cudaError_t status) {
  if (status == cudaSuccess) return nullptr;
  cudaGetLastError();
  return cudaGetErrorString(status);
}

// Numbers of each device that are looked up once. 0: not known yet.
class DeviceCache {
 public:
  // Calls look_up(device) for a device whose number is not known, and not if it gives 0.
  template <class LookUp>
  int64_t of_current(const LookUp& look_up) {
    int device = 0;
    if (message_of(cudaGetDevice(&device))) return 0;
    if (device >= kDevices) return look_up(device);
    int64_t known = numbers_[device].load(std::memory_order_relaxed);
    if (known == 0) numbers_[device].store(known = look_up(device), std::memory_order_relaxed);
    return known;
  }

 private:
  static constexpr int kDevices = 64;
  std::atomic<int64_t> numbers_[kDevices] = {};
};

// Whether the library has code for this kernel that the current device can run. Looked up once a device.
template <auto kernel>
static bool has_code() {
  constexpr int64_t kNo = 1, kYes = 2;
  static DeviceCache cache;
  return cache.of_current([](int) {
    cudaFuncAttributes attributes;
    return message_of(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel))) ? kNo : kYes;
  }) == kYes;
}

// Lets a kernel have more than kUnaskedSharedBytes on the current device, once a device.
static inline const char* allow_shared_bytes(const void* code, int64_t bytes) {
  static GivenMemory given;
  int device = 0;
  if (const char* error = message_of(cudaGetDevice(&device))) return error;
  const int64_t kib = ceil_div(bytes, 1024);  // the most that a block may have is a multiple, too
  if (given.has(code, device, kib)) return nullptr;
  const cudaError_t status = cudaFuncSetAttribute(code, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kib * 1024));
  if (const char* error = message_of(status)) return error;
  given.set(code, device, kib);
  return nullptr;
}

// Launches nothing if `blocks` is 0. `cluster`: the blocks of a cluster (cluster.h). Returns nullptr, or CUDA's error
// message.
template <class... Params>
static const char* launch_clusters(void (*kernel)(Params...), int64_t blocks, int cluster, int threads,
                                   int64_t shared_bytes, DeviceStream stream,
                                   const std::type_identity_t<Params>&... args) {
  if (blocks == 0) return nullptr;
  const void* const code = reinterpret_cast<const void*>(kernel);
  if (shared_bytes > kUnaskedSharedBytes) {
    if (const char* error = allow_shared_bytes(code, shared_bytes)) return error;
  }
  cudaLaunchAttribute size = {};
  size.id = cudaLaunchAttributeClusterDimension;
  size.val.clusterDim = {unsigned(cluster), 1, 1};
  const cudaLaunchConfig_t config = {
      dim3(unsigned(blocks)), dim3(unsigned(threads)), size_t(shared_bytes), stream, &size, cluster > 1 ? 1u : 0u};
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  return message_of(cudaLaunchKernelExC(&config, code, pointers));
}

// Sets bytes to 0, on the stream. Returns nullptr, or CUDA's error message.
static inline const char* clear_bytes(void* data, int64_t bytes, DeviceStream stream) {
  return message_of(cudaMemsetAsync(data, 0, size_t(bytes), stream));
}

// Looked up once a device.
static inline DeviceTraits device_traits() {
  constexpr int64_t kShift = int64_t(1) << 32;
  static DeviceCache cache;
  const int64_t found = cache.of_current([](int device) -> int64_t {
    int major = 0, minor = 0, count = 0;
    const bool known = !message_of(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) &&
                       !message_of(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device)) &&
                       !message_of(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return known ? (10 * major + minor) * kShift + count : 0;
  });
  return {int(found / kShift), int(found % kShift)};
}

#else

template <auto kernel>
static bool has_code() {
  return sim::has_code();
}
static inline const char* clear_bytes(void* data, int64_t bytes, DeviceStream) { return sim::clear_bytes(data, bytes); }
static inline DeviceTraits device_traits() { return {sim::compute_capability(), sim::kMultiprocessors}; }

template <class... Params>
static const char* launch_clusters(void (*kernel)(Params...), int64_t blocks, int cluster, int threads,
                                   int64_t shared_bytes, DeviceStream, const std::type_identity_t<Params>&... args) {
  if (blocks == 0) return nullptr;
  if (const char* refused = sim::why_no_launch(blocks, cluster, threads, shared_bytes)) return refused;
  sim::run_clusters(blocks, cluster, threads, shared_bytes, [&] { kernel(args...); });
  return nullptr;
}

#endif

template <class... Params>
static const char* launch(void (*kernel)(Params...), int64_t blocks, int threads, int64_t shared_bytes,
                          DeviceStream stream, const std::type_identity_t<Params>&... args) {
  return launch_clusters(kernel, blocks, 1, threads, shared_bytes, stream, args...);
}

}  // namespace scaledot
