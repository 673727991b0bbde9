// The kernels "default" and "default_decode", for any CPU.
#include "cpu/simd/isa/default.h"

#include "cpu/simd/attention/decode.h"

namespace scaledot {

extern const Kernel kDefaultKernel = tiled_kernel<PlainOperands>("default", why_not_at<Capability::default_isa>);
extern const Kernel kDefaultDecodeKernel = decode_kernel("default_decode", why_not_decode_at<Capability::default_isa>);

}  // namespace scaledot
