#if defined(__x86_64__)
#include "cpu/simd/isa/avx512_bf16.h"
#include "simd_functions_impl.h"
// Pair's operand, for the products.
#include "cpu/simd/pairs.h"

namespace scaledot::testing {
extern const SimdFunctions kAvx512Bf16Functions = simd_functions<Pair>("avx512_bf16");
}
#endif
