// The kernels "avx2" and "avx2_decode".
#include "cpu/simd/isa/avx2.h"

#include "cpu/simd/attention/decode.h"

namespace scaledot {

extern const Kernel kAvx2Kernel = tiled_kernel<PlainOperands>("avx2", why_not_at<Capability::avx2>);
extern const Kernel kAvx2DecodeKernel = decode_kernel("avx2_decode", why_not_decode_at<Capability::avx2>);

}  // namespace scaledot
