// The kernels "default" and "default_few_rows", for any CPU.
#include "cpu/simd/isa/baseline.h"

#include "cpu/simd/attention/decode.h"

namespace scaledot {

extern const Kernel kBaselineKernel = tiled_kernel<PlainOperands>("default", tiled_why_not);
extern const Kernel kBaselineDecodeKernel = decode_kernel("default_few_rows", decode_why_not);

}  // namespace scaledot
