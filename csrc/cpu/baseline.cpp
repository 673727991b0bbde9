// The kernels "default" and "default_few_rows", for any CPU.
#include "cpu/simd/isa/baseline.h"

#include "cpu/simd/attention/decode.h"

namespace scaledot {

extern const Kernel kBaselineKernel = tiled_kernel<PlainOperands>("default", why_not_at<Capability::baseline>);
extern const Kernel kBaselineDecodeKernel = decode_kernel("default_few_rows", why_not_decode_at<Capability::baseline>);

}  // namespace scaledot
