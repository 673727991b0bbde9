#include "cuda/sm90/instantiate.cuh"

namespace scaledot {

extern const Sm90Kernels kSm90ForwardFloat16 = Sm90<Float16>::kernels;

}  // namespace scaledot
