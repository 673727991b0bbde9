// The kernels "avx512", "avx512_decode" and "avx512_key_lists".
#include "cpu/simd/isa/avx512.h"

#include "cpu/simd/attention/decode_kernel.h"
#include "cpu/simd/attention/key_lists.h"

namespace scaledot {

extern const Kernel kAvx512Kernel = tiled_kernel<PlainOperands>("avx512", why_not_at<Capability::avx512>);
extern const Kernel kAvx512DecodeKernel = decode_kernel("avx512_decode", why_not_decode_at<Capability::avx512>);
extern const Kernel kAvx512KeyListsKernel =
    key_lists_kernel("avx512_key_lists", why_not_key_lists_at<Capability::avx512>);

}  // namespace scaledot
