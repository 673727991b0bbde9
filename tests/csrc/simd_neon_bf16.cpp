#if defined(__aarch64__)
#include "cpu/simd/isa/neon_bf16.h"
#include "simd_functions_impl.h"
// Bf16Pair's operand, for the products.
#include "cpu/simd/bf16_pairs.h"

namespace scaledot::testing {
extern const SimdFunctions kNeonBf16Functions = simd_functions<Bf16Pair>("neon_bf16");
}
#endif
