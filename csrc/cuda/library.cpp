// Offers the GPU kernels to the ops when libscaledot_cuda.so is loaded.
#include "cuda/library.h"

#include <cuda_runtime_api.h>

#include "build_info.h"
#include "cuda/masks.h"

namespace scaledot {
namespace {

const char* set_device(int index) {
  const cudaError_t status = cudaSetDevice(index);
  if (status == cudaSuccess) return nullptr;
  cudaGetLastError();  // or the next launch would report it
  return cudaGetErrorString(status);
}

const CudaLibrary kLibrary = {
    .version = SCALEDOT_VERSION,
    .toolkit = SCALEDOT_CUDA_VERSION,
    .archs = SCALEDOT_CUDA_ARCHS,
    .kernels = &cuda_kernels,
    .select = &select_cuda,
    .set_device = &set_device,
    .write_attends = &write_attends,
    .write_bias = &write_bias,
    .write_dropout_mask = &write_dropout_mask,
};

[[maybe_unused]] const bool registered = (register_cuda_library(&kLibrary), true);

}  // namespace
}  // namespace scaledot
