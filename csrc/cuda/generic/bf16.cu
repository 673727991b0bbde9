#include "cuda/generic/instantiate.cuh"

namespace scaledot {

extern const GenericKernels kGenericBFloat16 = Generic<BFloat16, 64, 128>::kernels;

}  // namespace scaledot
