#include "cpu/simd/generic.h"
#include "simd_functions_impl.h"

namespace scaledot::testing {
extern const SimdFunctions kScalarFunctions = simd_functions("default");
}
