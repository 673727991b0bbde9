#include "cpu/simd/isa/baseline.h"
#include "simd_functions_impl.h"

namespace scaledot::testing {
extern const SimdFunctions kBaselineFunctions = simd_functions("default");
}
