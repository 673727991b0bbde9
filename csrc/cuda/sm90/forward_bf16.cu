#include "cuda/sm90/forward_launch.cuh"

namespace scaledot {

extern const Sm90Kernels kSm90ForwardBFloat16 = Sm90Forward<BFloat16>::kernels;

}  // namespace scaledot
