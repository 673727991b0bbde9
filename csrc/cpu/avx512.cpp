// The kernels "avx512" and "avx512_decode".
#include "cpu/simd/isa/avx512.h"

#include "cpu/simd/attention/decode.h"

namespace scaledot {

extern const Kernel kAvx512Kernel = tiled_kernel<PlainOperands>("avx512", why_not_at<Capability::avx512>);
extern const Kernel kAvx512DecodeKernel = decode_kernel("avx512_decode", why_not_decode_at<Capability::avx512>);

}  // namespace scaledot
