#include "cuda/generic/instantiate.cuh"

namespace scaledot {

extern const GenericKernels kGenericFloat16 = Generic<Float16, 64, 128>::kernels;

}  // namespace scaledot
