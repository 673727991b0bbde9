// The kernels "default", "default_decode" and "default_key_lists", for any CPU.
#include "cpu/simd/isa/default.h"

#include "cpu/simd/attention/decode_kernel.h"
#include "cpu/simd/attention/key_lists.h"

namespace scaledot {

extern const Kernel kDefaultKernel = tiled_kernel<PlainOperands>("default", why_not_at<Capability::default_isa>);
extern const Kernel kDefaultDecodeKernel = decode_kernel("default_decode", why_not_decode_at<Capability::default_isa>);
extern const Kernel kDefaultKeyListsKernel =
    key_lists_kernel("default_key_lists", why_not_key_lists_at<Capability::default_isa>);

}  // namespace scaledot
