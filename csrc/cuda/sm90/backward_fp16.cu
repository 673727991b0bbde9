#include "cuda/sm90/backward_launch.cuh"

namespace scaledot {

extern const Sm90Kernels kSm90BackwardFloat16 = Sm90Backward<Float16>::kernels;

}  // namespace scaledot
