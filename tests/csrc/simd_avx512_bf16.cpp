#if defined(__x86_64__)
#include "cpu/simd/isa/avx512_bf16.h"
#include "simd_functions_impl.h"
// Bf16Pair's operand, for the products.
#include "cpu/simd/bf16_pairs.h"

namespace scaledot::testing {
extern const SimdFunctions kAvx512Bf16Functions = simd_functions<Bf16Pair>("avx512_bf16");
}
#endif
