#include "cuda/sm90/backward_host.cuh"

namespace scaledot {

extern const Sm90Kernels kSm90BackwardBFloat16 = Backward90<BFloat16>::kernels;

}  // namespace scaledot
