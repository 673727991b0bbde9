// The kernels "avx2", "avx2_decode" and "avx2_key_lists".
#include "cpu/simd/isa/avx2.h"

#include "cpu/simd/attention/decode_kernel.h"
#include "cpu/simd/attention/key_lists.h"

namespace scaledot {

extern const Kernel kAvx2Kernel = tiled_kernel<PlainOperands>("avx2", why_not_at<Capability::avx2>);
extern const Kernel kAvx2DecodeKernel = decode_kernel("avx2_decode", why_not_decode_at<Capability::avx2>);
extern const Kernel kAvx2KeyListsKernel = key_lists_kernel("avx2_key_lists", why_not_key_lists_at<Capability::avx2>);

}  // namespace scaledot
