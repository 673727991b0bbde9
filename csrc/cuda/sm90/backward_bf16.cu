#include "cuda/sm90/backward_launch.cuh"

namespace scaledot {

extern const Sm90Kernels kSm90BackwardBFloat16 = Sm90Backward<BFloat16>::kernels;

}  // namespace scaledot
