#include "cuda/generic/instantiate.cuh"

namespace scaledot {

extern const GenericKernels kGenericFloat64 = Generic<double, 64>::kernels;

}  // namespace scaledot
