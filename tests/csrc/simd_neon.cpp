#if defined(__aarch64__)
#include "cpu/simd/isa/neon.h"
#include "simd_functions_impl.h"

namespace scaledot::testing {
extern const SimdFunctions kNeonFunctions = simd_functions("neon");
}
#endif
