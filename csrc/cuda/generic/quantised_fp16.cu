#include "cuda/generic/quantised_forward.cuh"

namespace scaledot {

extern const QuantisedForward kQuantisedFloat16 = &quantised_forward<Float16, 64, 128>;

}  // namespace scaledot
