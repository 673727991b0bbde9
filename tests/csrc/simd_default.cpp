#include "cpu/simd/isa/default.h"
#include "simd_functions_impl.h"

namespace scaledot::testing {
extern const SimdFunctions kDefaultFunctions = simd_functions("default");
}
