#if defined(__aarch64__)
#include "cpu/simd/isa/neon_bf16.h"
#include "simd_functions_impl.h"
// Pair's operand, for the products.
#include "cpu/simd/pairs.h"

namespace scaledot::testing {
extern const SimdFunctions kNeonBf16Functions = simd_functions<Pair>("neon_bf16");
}
#endif
