#include "cuda/sm90/backward_host.cuh"

namespace scaledot {

extern const Sm90Kernels kSm90BackwardFloat16 = Backward90<Float16>::kernels;

}  // namespace scaledot
