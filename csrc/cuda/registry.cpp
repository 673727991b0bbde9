// Where the ops find the GPU kernels. Part of libscaledot_kernels.so, which the ops and libscaledot_cuda.so both link.
#include <atomic>

#include "cuda/library.h"

namespace scaledot {
namespace {
std::atomic<const CudaLibrary*> loaded{nullptr};
}

const CudaLibrary* cuda_library() { return loaded.load(std::memory_order_acquire); }

void register_cuda_library(const CudaLibrary* library) { loaded.store(library, std::memory_order_release); }

}  // namespace scaledot
