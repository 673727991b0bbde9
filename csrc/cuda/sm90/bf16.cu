#include "cuda/sm90/instantiate.cuh"

namespace scaledot {

extern const Sm90Kernels kSm90ForwardBFloat16 = Sm90<BFloat16>::kernels;

}  // namespace scaledot
