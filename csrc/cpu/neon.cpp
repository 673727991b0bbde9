// The kernels "neon", "neon_decode" and "neon_key_lists".
#include "cpu/simd/isa/neon.h"

#include "cpu/simd/attention/decode_kernel.h"
#include "cpu/simd/attention/key_lists.h"

namespace scaledot {

extern const Kernel kNeonKernel = tiled_kernel<PlainOperands>("neon", why_not_at<Capability::neon>);
extern const Kernel kNeonDecodeKernel = decode_kernel("neon_decode", why_not_decode_at<Capability::neon>);
extern const Kernel kNeonKeyListsKernel = key_lists_kernel("neon_key_lists", why_not_key_lists_at<Capability::neon>);

}  // namespace scaledot
