#if defined(__x86_64__)
#include "cpu/simd/isa/avx512.h"
#include "simd_functions_impl.h"

namespace scaledot::testing {
extern const SimdFunctions kAvx512Functions = simd_functions("avx512");
}
#endif
