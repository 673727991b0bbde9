#include "cuda/generic/quantised_forward.cuh"

namespace scaledot {

extern const QuantisedForward kQuantisedFloat32 = &quantised_forward<float, 64, 128>;

}  // namespace scaledot
