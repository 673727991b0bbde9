#include "cuda/generic/instantiate.cuh"

namespace scaledot {

extern const GenericKernels kGenericFloat32 = Generic<float, 64, 128>::kernels;

}  // namespace scaledot
