// Offers the GPU kernels to the ops when libscaledot_cuda.so is loaded.
#include "cuda/library.h"

#include <cuda_runtime_api.h>

#include <atomic>

#include "build_info.h"
#include "cuda/archs.h"
#include "cuda/masks.h"

namespace scaledot {
namespace {

const char* set_device(int index) {
  const cudaError_t status = cudaSetDevice(index);
  if (status == cudaSuccess) return nullptr;
  cudaGetLastError();  // or the next launch would report it
  return cudaGetErrorString(status);
}

int needs_compiler() {
  static std::atomic<int> known{0};  // a capability that has code: the list is read once, not in each call
  const int capability = device_capability();
  if (capability == known.load(std::memory_order_relaxed)) return 0;
  if (!has_machine_code(SCALEDOT_CUDA_ARCHS, capability)) return capability;
  known.store(capability, std::memory_order_relaxed);
  return 0;
}

const CudaLibrary kLibrary = {
    .version = SCALEDOT_VERSION,
    .toolkit = SCALEDOT_CUDA_VERSION,
    .archs = SCALEDOT_CUDA_ARCHS,
    .kernels = &cuda_kernels,
    .select = &select_cuda,
    .set_device = &set_device,
    .needs_compiler = &needs_compiler,
    .write_attends = &write_attends,
    .write_bias = &write_bias,
    .write_dropout_mask = &write_dropout_mask,
};

[[maybe_unused]] const bool registered = (register_cuda_library(&kLibrary), true);

}  // namespace
}  // namespace scaledot
