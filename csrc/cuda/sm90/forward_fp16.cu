#include "cuda/sm90/forward_launch.cuh"

namespace scaledot {

extern const Sm90Kernels kSm90ForwardFloat16 = Sm90Forward<Float16>::kernels;

}  // namespace scaledot
