#if defined(__x86_64__)
#include "cpu/simd/isa/avx2.h"
#include "simd_functions_impl.h"

namespace scaledot::testing {
extern const SimdFunctions kAvx2Functions = simd_functions("avx2");
}
#endif
