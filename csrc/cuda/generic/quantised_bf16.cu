#include "cuda/generic/quantised_forward.cuh"

namespace scaledot {

extern const QuantisedForward kQuantisedBFloat16 = &quantised_forward<BFloat16, 64, 128>;

}  // namespace scaledot
