// Offers the GPU kernels to the ops when libscaledot_cuda.so is loaded.
#include "cuda/library.h"

#include <cuda_runtime_api.h>

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
  const int capability = device_capability();
  return has_machine_code(SCALEDOT_CUDA_ARCHS, capability) ? 0 : capability;
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
