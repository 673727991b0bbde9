// The kernels "neon" and "neon_decode".
#include "cpu/simd/isa/neon.h"

#include "cpu/simd/attention/decode.h"

namespace scaledot {

extern const Kernel kNeonKernel = tiled_kernel<PlainOperands>("neon", why_not_at<Capability::neon>);
extern const Kernel kNeonDecodeKernel = decode_kernel("neon_decode", why_not_decode_at<Capability::neon>);

}  // namespace scaledot
